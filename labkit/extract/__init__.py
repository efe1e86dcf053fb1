"""Hidden states of the target to disk, through vLLM or Transformers, a checked file a conversation."""

from __future__ import annotations

from labkit.extract.checks import verify
from labkit.extract.flags import UnfitServer, refuse_flags
from labkit.extract.forms import FORMS, UnknownForm, load_states, save_states
from labkit.extract.heads import FinalHead, NoFinalHead, final_head
from labkit.extract.layers import BadLayers, default_layers, layers_of
from labkit.extract.record import (
    BadShard,
    OtherStates,
    ShardBusy,
    bytes_needed,
    rows_of,
    rows_of_shard,
    states_path,
)
from labkit.extract.reference import NoReference, Reference
from labkit.extract.served import NoStates
from labkit.extract.shards import ShardDone
from labkit.extract.shards import done as shard_done
from labkit.extract.states import BACKENDS, BrokenStates, UnknownBackend, check_choices, run

__all__ = [
    "BACKENDS",
    "FORMS",
    "BadLayers",
    "BadShard",
    "BrokenStates",
    "FinalHead",
    "NoFinalHead",
    "NoReference",
    "NoStates",
    "OtherStates",
    "Reference",
    "ShardBusy",
    "ShardDone",
    "UnfitServer",
    "UnknownBackend",
    "UnknownForm",
    "bytes_needed",
    "check_choices",
    "default_layers",
    "final_head",
    "layers_of",
    "load_states",
    "refuse_flags",
    "rows_of",
    "rows_of_shard",
    "run",
    "save_states",
    "shard_done",
    "states_path",
    "verify",
]
