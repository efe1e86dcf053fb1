"""Ways to speculate with a target: which are possible, what each costs to try and is predicted to bring."""

from __future__ import annotations

from labkit.options.possible import Engine, installed_engine, obstacles
from labkit.options.ranking import rank
from labkit.options.steps import next_steps, write_next_steps

__all__ = ["Engine", "installed_engine", "next_steps", "obstacles", "rank", "write_next_steps"]
