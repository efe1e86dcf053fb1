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
    """A trap by its number; `tests` catch it, or `reason` says why no test can.

    What stands in brackets behind a test is the check that its cases of this trap name.
    """

    number: int
    title: str
    tests: tuple[str, ...] = ()
    reason: str = ""


TRAPS = (
    Trap(
        1,
        "the loss mask not shifted with the tokens: the first token of an answer untrained",
        (
            "unit/test_train.py::test_the_first_token_of_an_answer_is_where_supervision_begins",
            "unit/test_train.py::test_a_batch_pairs_each_token_with_the_state_before_it_and_the_target_at_it",
        ),
    ),
    Trap(
        2,
        "the last captured layer taken for the final one, or layers counted from the other side",
        (
            "unit/test_extract_faults.py::test_the_last_layer_in_another_place_is_named",
            "unit/test_extract_faults.py::test_a_layer_off_by_one_is_named_in_every_place",
            f"{DAMAGE}[layer counting]",
        ),
    ),
    Trap(
        3,
        "states of one layer too low or too high",
        (
            "unit/test_extract_faults.py::test_a_layer_off_by_one_is_named_in_every_place",
            f"{DAMAGE}[layer counting]",
        ),
    ),
    Trap(
        4,
        "the last layer's id off by one",
        ("unit/test_extract_faults.py::test_the_last_layer_too_early_is_suspected_without_a_comparison",),
    ),
    Trap(
        5,
        "an engine that leaves the last layer's output out",
        ("unit/test_extract_faults.py::test_other_layers_than_asked_for_are_refused",),
    ),
    Trap(
        6,
        "prefix caching makes states shorter than their tokens",
        ("unit/test_extract_flow.py::test_options_that_spoil_states_are_refused_before_the_load",),
    ),
    Trap(
        7,
        "states of zeros or without numbers",
        (
            "unit/test_extract_forms.py::test_a_zero_state_stays_zero_and_is_seen",
            "unit/test_extract_faults.py::test_one_bad_file_among_good_ones_is_named",
        ),
    ),
    Trap(
        8,
        "other states in a batch or in a repeated call",
        (
            "unit/test_extract_reference.py::test_repeated_calls_give_the_same_states",
            "unit/test_extract_reference.py::test_padding_touches_no_state",
        ),
    ),
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
        12,
        "states that the final norm was applied to already, or not again",
        ("unit/test_extract_faults.py::test_a_norm_that_was_applied_already_is_named",),
    ),
    Trap(
        13,
        "a random embedding shipped with the head",
        (f"{DAMAGE}[embedding]", "unit/test_draft_preflight.py::test_the_targets_own_embedding_is_no_false_alarm"),
    ),
    Trap(
        14,
        "no lm_head in the file: random drafts",
        (f"{DAMAGE}[missing]", "unit/test_draft_forms.py::test_what_has_no_flat_form_or_no_lm_head_is_refused"),
    ),
    Trap(
        15,
        "norm flags lost between training and serving, or unknown to the engine",
        (
            f"{DAMAGE}[norm flags]",
            "unit/test_draft_preflight.py::test_what_sglang_does_not_do_is_named",
            "unit/test_draft_preflight.py::test_a_flag_that_the_installed_vllm_does_not_read_is_named",
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
            f"{DAMAGE}[map]",
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
        (
            "unit/test_vocab_data.py::test_more_draft_tokens_than_seen_ones_are_filled_and_said",
            f"{DAMAGE}[missing map]",
        ),
    ),
    Trap(
        19,
        "the draft's vocabulary size where the verifier's belongs",
        (
            f"{DAMAGE}[vocabulary size]",
            "unit/test_draft_preflight.py::test_a_padded_vocabulary_is_told_from_a_wrong_one",
        ),
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
            f"{DAMAGE}[rope schemas]",
            "unit/test_draft_targets.py::test_old_and_new_rope_schemas_are_read_alike",
            "unit/test_draft_targets.py::test_kimis_rope_is_the_targets_in_both_schemas",
        ),
    ),
    Trap(
        22,
        "max_position_embeddings of 2048 over a target of more",
        (
            f"{DAMAGE}[positions]",
            "unit/test_draft_preflight.py::test_shorter_contexts_may_be_served_with_fewer_positions",
        ),
    ),
    Trap(
        23,
        "YaRN of Kimi and gpt-oss turned otherwise in training than in serving",
        ("unit/test_draft_targets.py::test_rope_turns_alike_in_training_and_in_vllm",),
    ),
    Trap(
        24,
        "a draft trained with a sliding window and served without",
        (
            f"{DAMAGE}[window]",
            "unit/test_draft_preflight.py::test_sliding_windows_that_vllm_honours_are_no_problem",
        ),
    ),
    Trap(
        25,
        "an empty mask, another template than the target's, two BOS",
        (
            "unit/test_train.py::test_data_that_cannot_train_a_head_is_refused_with_the_likely_cause",
            "unit/test_conversations_template.py::test_ids_and_mask_are_the_templates_own",
            "unit/test_conversations_template.py::test_there_is_one_bos",
        ),
    ),
    Trap(
        26,
        "answers cut at a length limit counted as whole",
        (
            "unit/test_conversations_turns.py::test_the_data_sets_own_answers_are_rendered_cut_and_counted",
            "unit/test_conversations.py::test_truncation_never_leaves_a_row_without_an_answer",
        ),
    ),
    Trap(
        27,
        "reasoning dropped from the history of regenerated conversations",
        (
            "unit/test_conversations_turns.py::test_reasoning_stays_in_the_history_and_can_be_left_out_of_training",
            "unit/test_conversations_template.py::test_a_template_that_drops_earlier_reasoning_gives_a_row_an_answer_each_with_its_own_reasoning",
        ),
    ),
    Trap(
        28,
        "too little data: a short acceptance length that is no defect",
        reason="no test can: the plan and notebook 04 say what published heads took and reached",
    ),
    Trap(
        29,
        "losses without numbers; a mean over something else than trained tokens",
        (
            "unit/test_train.py::test_states_that_are_not_finite_leave_out_their_conversation_and_no_other",
            "unit/test_train.py::test_held_out_loss_is_a_mean_over_trained_tokens",
            "unit/test_train.py::test_how_conversations_are_packed_changes_no_loss",
        ),
    ),
    Trap(
        30,
        "a disk filled with states",
        (
            "unit/test_planner.py::test_full_disk_is_refused_with_what_would_do",
            "unit/test_extract_flow.py::test_a_filling_disk_holds_work_back_and_stops_it_before_it_is_full",
        ),
    ),
    Trap(
        31,
        "an FP8 cache under extraction",
        ("unit/test_extract_flow.py::test_options_that_spoil_states_are_refused_before_the_load",),
    ),
    Trap(
        32,
        "no acceptance before serving; another vocabulary only by capturing again; random prompts flatter",
        (
            "unit/test_train.py::test_simulation_equals_a_draft_run_token_by_token",
            "unit/test_train.py::test_a_token_outside_the_draft_vocabulary_is_a_miss",
            "unit/test_train.py::test_a_head_goes_on_with_another_vocabulary_where_its_lm_head_is_the_targets",
        ),
    ),
    Trap(
        33,
        "extraction over pipeline stages",
        ("unit/test_extract_flow.py::test_options_that_spoil_states_are_refused_before_the_load",),
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
        file, _, name = node.removesuffix("]").partition("::")
        name, _, check = name.partition("[")
        assert name in functions(file), f"{file} has no test {name}"
        assert not check or f'"{check}", ' in (TESTS / file).read_text(), f"{file} has no case of {check!r}"


def test_every_trap_is_there_once():
    assert [trap.number for trap in TRAPS] == list(range(1, 34))
