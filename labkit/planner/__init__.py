"""What training a head takes: hours, disk and memory, here and on other machines, before anything is spent."""

from __future__ import annotations

from labkit.planner.head import Head, disk_bytes, head_of, state_bytes
from labkit.planner.machines import Machine, machine, rentable
from labkit.planner.memory import Serving, serving, target_gb, training_gb
from labkit.planner.obstacles import Obstacle
from labkit.planner.plan import DoesNotFit, Plan, elsewhere, plan, verdict
from labkit.planner.rates import NoRate, Rates, predicted
from labkit.planner.work import BadPlan, Work, conversations_for

__all__ = [
    "BadPlan",
    "DoesNotFit",
    "Head",
    "Machine",
    "NoRate",
    "Obstacle",
    "Plan",
    "Rates",
    "Serving",
    "Work",
    "conversations_for",
    "disk_bytes",
    "elsewhere",
    "head_of",
    "machine",
    "plan",
    "predicted",
    "rentable",
    "serving",
    "state_bytes",
    "target_gb",
    "training_gb",
    "verdict",
]
