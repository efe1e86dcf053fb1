"""Side-by-side timings against peers, printed by `make bench`; nothing in labkit imports from here."""
