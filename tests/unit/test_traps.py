"""The ways in which people lost days with EAGLE-3 (facts/eagle3.md, section 2), each with what catches it here."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
DAMAGE = "unit/test_draft_preflight.py::test_each_damage_is_named_and_nothing_else"


@dataclass(frozen=True)
class Trap:
    """A trap by its number; `tests` catch it, or `reason` says why it cannot happen here."""

    number: int
    title: str
    tests: tuple[str, ...] = ()
    reason: str = ""


TRAPS = (
    Trap(
        9,
        "the final norm left out before lm_head",
        ("unit/test_extract.py::test_verify_applies_the_final_norm",),
    ),
    Trap(
        10,
        "Gemma's and Qwen3.5's norms multiply by 1 + weight, the draft's verifier norm does not",
        (
            "unit/test_draft_targets.py::test_norms_of_the_one_plus_w_kind_train_against_the_right_logits",
            "unit/test_draft_preflight.py::test_gemmas_norm_is_named_for_heads_that_speculators_trained",
        ),
    ),
    Trap(
        11,
        "another part's norm taken from a multimodal checkpoint",
        ("unit/test_draft_targets.py::test_a_decoy_norm_in_a_multimodal_checkpoint_is_not_taken",),
    ),
    Trap(
        13,
        "a random embedding shipped with the head",
        (DAMAGE, "unit/test_draft_preflight.py::test_the_targets_own_embedding_is_no_false_alarm"),
    ),
    Trap(
        14,
        "no lm_head in the file: random drafts",
        (DAMAGE, "unit/test_draft_forms.py::test_what_has_no_flat_form_or_no_lm_head_is_refused"),
    ),
    Trap(
        15,
        "norm flags lost between training and serving, or unknown to the engine",
        (
            DAMAGE,
            "unit/test_draft_preflight.py::test_what_sglang_does_not_do_is_named",
            "unit/test_draft_forms.py::test_vllm_reads_the_flat_form_as_the_other",
            "unit/test_draft_forms.py::test_both_forms_compute_what_the_convention_says",
        ),
    ),
    Trap(
        16,
        "d2t with another meaning: absolute ids, or a default of 0, 1, 2, ...",
        (
            "unit/test_vocab_others.py::test_absolute_ids_are_recognised_with_and_without_t2d",
            "unit/test_vocab_others.py::test_the_default_that_nobody_replaced",
            DAMAGE,
        ),
    ),
    Trap(
        17,
        "maps of another data set, size or training",
        (
            "unit/test_vocab_data.py::test_a_map_made_from_anything_else_is_stale",
            "unit/test_draft_preflight.py::test_the_map_of_another_training_is_named",
        ),
    ),
    Trap(
        18,
        "a draft vocabulary larger than the tokens seen; maps missing from the checkpoint",
        ("unit/test_vocab_data.py::test_more_draft_tokens_than_seen_ones_are_filled_and_said", DAMAGE),
    ),
    Trap(
        19,
        "the draft's vocabulary size where the verifier's belongs",
        (DAMAGE, "unit/test_draft_preflight.py::test_a_padded_vocabulary_is_told_from_a_wrong_one"),
    ),
    Trap(
        20,
        "lm_head rows cut at the offsets of d2t",
        ("unit/test_draft_preflight.py::test_lm_head_cut_by_offsets_instead_of_ids_is_named",),
    ),
    Trap(
        21,
        "RoPE lost, or said in one schema only",
        (
            DAMAGE,
            "unit/test_draft_targets.py::test_old_and_new_rope_schemas_are_read_alike",
            "unit/test_draft_targets.py::test_kimis_rope_is_the_targets_in_both_schemas",
        ),
    ),
    Trap(
        22,
        "max_position_embeddings of 2048 over a target of more",
        (DAMAGE, "unit/test_draft_preflight.py::test_shorter_contexts_may_be_served_with_fewer_positions"),
    ),
    Trap(
        23,
        "YaRN of Kimi and gpt-oss turned otherwise in training than in serving",
        ("unit/test_draft_targets.py::test_rope_turns_alike_in_training_and_in_vllm",),
    ),
    Trap(
        24,
        "a draft trained with a sliding window and served without",
        (DAMAGE, "unit/test_draft_preflight.py::test_sliding_windows_that_vllm_honours_are_no_problem"),
    ),
)


@cache
def functions(file: str) -> frozenset[str]:
    """The test functions that a file defines."""
    path = TESTS / file
    tree = ast.parse(path.read_text()) if path.is_file() else ast.Module([], [])
    return frozenset(
        node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    )


@pytest.mark.parametrize("trap", TRAPS, ids=lambda trap: str(trap.number))
def test_what_the_table_names_exists(trap):
    assert trap.title
    assert bool(trap.tests) != bool(trap.reason), "either tests or a reason"
    for node in trap.tests:
        file, _, name = node.partition("::")
        assert name in functions(file), f"{file} has no test {name}"


def test_every_trap_is_there_once():
    assert [trap.number for trap in TRAPS] == list(range(1, 34))
