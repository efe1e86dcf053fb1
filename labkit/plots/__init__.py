"""Figures from data frames: each function draws on an axes and returns it; nothing is computed or saved here."""
