"""The plan of a training: arithmetic by hand, published runs inside the intervals, refusals with a way out."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from transformers import LlamaConfig
from typer.testing import CliRunner

from labkit import cli, planner, targets
from labkit.costmodel import Range, UnknownHardware
from labkit.planner import Machine, Work, rates, writing
from labkit.planner.head import head_of, state_bytes
from labkit.planner.plan import on_the_fly, spent, told_range

KIMI, BOX = "kimi-k2.5", "rtx-pro-6000-pcie-x8"

LLAMA_8B = targets.geometry(
    {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
    }
)


@pytest.fixture(scope="module")
def plan() -> planner.Plan:
    return planner.plan(KIMI, BOX)


def inside(value: float, interval: Range) -> bool:
    return interval.low <= value <= interval.high


# --- arithmetic by hand


def test_states_of_kimi_take_57344_bytes_a_token_and_100k_samples_11_7_tb():
    """eagle3.md, 'Our arithmetic': 4 x 7168 x 2; 100k samples of 2k tokens 11.7 TB, 5k of 1k 0.29 TB."""
    kimi = targets.geometry(KIMI)
    assert state_bytes(kimi) == 57_344
    assert state_bytes(kimi, 1) == 28_672
    assert planner.disk_bytes(kimi, 100_000 * 2048) / 1e12 == pytest.approx(11.75, abs=0.02)
    assert planner.disk_bytes(kimi, 5_000 * 1_000) / 1e12 == pytest.approx(0.287, abs=0.001)


def test_llamas_68k_sharegpt_states_are_about_740_gb():
    """EAGLE#30: 68k ShareGPT at hidden size 4096 took 740 GB: 332 tokens of four states each, or 443 of three."""
    each = planner.disk_bytes(LLAMA_8B, 1)
    assert 300 < 740e9 / 68_000 / each < 600


def test_kimis_head_by_hand():
    """64 heads of 128: q, k, v over two widths, o, three projections of 18,432; fc 3 x 7168 x 7168."""
    head = head_of(targets.geometry(KIMI), 32_000)
    assert head.layer == 3 * (2 * 7168 * 8192) + 8192 * 7168 + 3 * 7168 * 18432
    assert head.fusion == 3 * 7168 * 7168
    assert head.lm_head == 32_000 * 7168
    assert head.served == pytest.approx(1.2e9, rel=0.02), "BACKGROUND: about 1B parameters"


def test_head_has_the_weights_of_speculators_own_model():
    """Eagle3DraftModel over Llama-3.1-8B's shape, built without memory for its weights."""
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    names = (
        "hidden_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "intermediate_size",
        "vocab_size",
    )
    layer = LlamaConfig(num_hidden_layers=1, **{name: getattr(LLAMA_8B, name) for name in names})
    with torch.device("meta"):
        model = Eagle3DraftModel(Eagle3SpeculatorConfig(transformer_layer_config=layer, draft_vocab_size=32_000))
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    head = head_of(LLAMA_8B, 32_000)
    layers = sum(size for name, size in sizes.items() if name.startswith("layers.") and "norm" not in name)
    assert layers == head.layer
    assert (sizes["fc.weight"], sizes["lm_head.weight"]) == (head.fusion, head.lm_head)
    assert sizes["embed_tokens.weight"] == head.embedding


def test_training_arithmetic_by_hand():
    """3 TTT steps of (6 x layer + 4 x lm_head), fc once, the target's logits once."""
    head = planner.Head(layer=10, fusion=3, lm_head=7, embedding=100)
    assert head.flops_per_token(3) == 3 * (60 + 28) + 18 + 14
    assert head.trainable == 13
    assert head.served == 20


def test_kimis_weights_are_its_checkpoint():
    """1,026 B weights: routed experts in INT4 with a bf16 scale per 32 (0.5625 B), the rest bf16; about 595 GB."""
    kimi = targets.geometry(KIMI)
    routed = 60 * 384 * 3 * 7168 * 2048 * 0.5625
    rest = 2 * (6.17e9 + 0.40e9 + 2.64e9 + 0.165e9 + 1.17e9 + 1.17e9)
    assert planner.target_gb(kimi, 1) == pytest.approx((routed + rest) / 1e9, rel=0.005)


def test_hours_are_tokens_over_rates(plan):
    work, found = plan.work, plan.rates
    assert plan.hours["training"].mid == pytest.approx(work.trained_tokens / found.training.mid / 3600)
    assert plan.hours["extraction"].high == pytest.approx(work.tokens / found.extraction.low / 3600)
    answered = work.conversations * work.answer_tokens / found.decode.mid
    prompted = work.conversations * work.prompt_tokens / found.prefill.mid
    assert plan.hours["generation"].mid == pytest.approx((answered + prompted) / 3600)
    assert plan.total.mid == pytest.approx(sum(h.mid for h in plan.hours.values()))


def test_disk_limits_extraction_and_training():
    """At 57,344 bytes a token a disk of 0.0573 GB/s passes 1,000 tokens a second."""
    slow = planner.machine(BOX, disk_gb_s=0.057344)
    found = planner.plan(KIMI, slow).rates
    assert tuple(found.extraction) == pytest.approx((1000, 1000, 1000))
    assert found.training.high == pytest.approx(1000)
    assert planner.plan(KIMI, slow, Work(item_bytes=1)).rates.extraction.mid == pytest.approx(2000)


def test_allreduce_alone_bounds_prefill():
    """123 AllReduces of 14,336 bytes a token, each 2 x 7/8 times over a bus of 1 GB/s: 3.09 ms a token."""
    kimi, work = targets.geometry(KIMI), Work()
    machine = dataclasses.replace(planner.machine(BOX), bus_gb_s=Range.of(1.0), peak_tflops=1e9)
    served = planner.serving(kimi, machine, work)
    measured = dict(machine.hardware.measured[KIMI])
    count = measured["allreduces"]
    rate = rates.prefill_rate(kimi, machine, served, work)
    assert 1 / rate.mid == pytest.approx(count * 14_336 * 2 * 7 / 8 / 1e9, rel=0.03)


# --- published runs inside the intervals


@pytest.mark.parametrize(("length", "published"), [(8192, 7283), (32768, 6604), (65536, 5852), (131072, 4766)])
def test_published_prefill_of_kimi_on_the_box(length, published):
    """rtx6kpro, Kimi-K2.6 on 8 RTX PRO 6000, exact prefill from the server's counters."""
    machine = planner.machine(BOX)
    work = Work(prompt_tokens=length - 1, answer_tokens=1)
    kimi = targets.geometry(KIMI)
    assert inside(published, rates.prefill_rate(kimi, machine, planner.Serving(8, 1, 1, 80), work))


@pytest.mark.parametrize(
    ("streams", "published"), [(8, 340.7), (16, 475.2), (32, 823.6), (64, 1330.2), (128, 2026.3)]
)
def test_published_generation_of_kimi_on_the_box(streams, published):
    """rtx6kpro, K2.6 without speculation by streams, next to no context."""
    machine = planner.machine(f"{BOX}-tuned")
    found = rates.decode_rate(
        targets.geometry(KIMI),
        machine,
        planner.Serving(8, 1, streams, 80),
        Work(prompt_tokens=1, answer_tokens=512),
    )
    assert inside(published, found)


@pytest.mark.parametrize(
    ("name", "streams", "each"),
    [
        ("h200-x8", 16, 46.6),
        ("h200-x8", 64, 16.7),
        ("b200-x8", 16, 59.2),
        ("b200-x8", 64, 26.0),
        ("b300-x8", 16, 60.6),
        ("b300-x8", 64, 26.8),
    ],
)
def test_published_generation_of_kimi_on_rented_machines(name, streams, each):
    """InferenceX, Kimi-K2.5 INT4, vLLM, TP=8, 8192 tokens in and 1024 out: decode tokens a second and request."""
    work = Work(prompt_tokens=8192, answer_tokens=1024)
    machine = planner.machine(name)
    served = planner.Serving(8, 1, streams, 80)
    kimi = targets.geometry(KIMI)
    decode = rates.decode_rate(kimi, machine, served, work)
    prefill = rates.prefill_rate(kimi, machine, served, work)
    # The same engine prefills 8 tokens for each that it decodes: what is left for decoding, end by end.
    left = [1 / (1 / d + 8 / p) for d, p in zip(decode, prefill, strict=True)]
    assert left[0] <= streams * each <= decode.high


def test_published_kimi_head_on_32_h200():
    """Card: 300k samples a phase in 14 h on 32 H200; blog: 600k samples, 6 B tokens, 1,500 H200-hours in all.

    Its head has the full vocabulary, a feed-forward of 12,288 and 4 TTT steps; states streamed, never stored.
    """
    machine = planner.machine("h200-x8", gpus=32)
    kimi = dataclasses.replace(targets.geometry(KIMI), intermediate_size=12288)
    served = planner.Serving(8, 4, 128, 80)
    head = head_of(kimi, 163_840)
    for samples, hours in ((300_000, 14.0 * 32), (600_000, 1500.0)):
        work = Work(
            conversations=samples,
            prompt_tokens=1,
            answer_tokens=9999,
            draft_vocab_size=163_840,
            ttt_steps=4,
            stored=False,
        )
        found = rates.predicted(targets.geometry(KIMI), machine, head, work, served)
        gpu_hours = rates.scaled(
            rates.added(spent(work.tokens, found.extraction), spent(work.tokens, found.training)), 32
        )
        assert inside(hours, gpu_hours), told_range(gpu_hours)


def test_published_llama_head_of_nemo_on_8_a100():
    """200k samples, one epoch, 4 TTT steps in about 2 h, target and head on the same GPUs.

    The guide gives the limit (2,048 tokens), not the mean: a mean of 500 to 2,048 has to hold 2 h somewhere.
    """
    machine = planner.machine("nvidia-a100-80gb", gpus=8)
    ends = []
    for length in (500, 2048):
        work = Work(conversations=200_000, prompt_tokens=1, answer_tokens=length - 1, ttt_steps=4, stored=False)
        served = planner.serving(LLAMA_8B, machine, work)
        found = rates.predicted(LLAMA_8B, machine, head_of(LLAMA_8B, 32_000), work, served)
        ends.append(rates.added(spent(work.tokens, found.extraction), spent(work.tokens, found.training)))
    assert ends[0].low <= 2.0 <= ends[1].high
    assert inside(2.0, Range(ends[0].mid, (ends[0].mid + ends[1].mid) / 2, ends[1].high))


def h100(gpus: int) -> Machine:
    """H100s as speculators' examples used them: the H200's arithmetic, less memory and bandwidth."""
    base = planner.machine("nvidia-h200", gpus=gpus, memory_gb=80)
    narrower = dataclasses.replace(base.hardware, bandwidth_gb_s=Range.of(3350))
    return dataclasses.replace(base, hardware=narrower)


def test_published_tiny_run_of_speculators_on_2_h100():
    """UltraChat 5k, Llama-3.1-8B, 5 epochs, 3 TTT steps: 143 s to extract, 327 s to train.

    UltraChat's mean length stands in no card that was read; 1,200 tokens a conversation is its usual figure.
    """
    work = Work(conversations=5_000, prompt_tokens=200, answer_tokens=1000, epochs=5)
    found = planner.plan(LLAMA_8B, h100(2), work)
    assert (found.served.tensor_parallel_size, found.served.replicas) == (1, 2)
    assert inside(143 / 3600, found.hours["extraction"])
    assert inside(327 / 3600, found.hours["training"])


def test_published_online_run_of_speculators_on_4_h100():
    """Qwen3-8B, ShareGPT 5k, 5 epochs, two GPUs serve and two train: 942 s, a mean of 1,000 to 2,500 tokens."""
    work = Work(conversations=5_000, prompt_tokens=300, answer_tokens=1300, epochs=5, stored=False)
    interval = on_the_fly(LLAMA_8B, h100(4), head_of(LLAMA_8B, 32_000), work)
    assert inside(942 / 3600, interval)


# --- refusals


def test_full_disk_is_refused_with_what_would_do():
    found = planner.plan(KIMI, BOX, free_gb=4000)
    (obstacle,) = found.obstacles
    assert "11.77 TB" in obstacle.what
    assert "4.00 TB" in obstacle.what
    fewer = next(way for way in obstacle.instead if way.startswith("take"))
    count = int(fewer.split()[1].replace(",", ""))
    fits = dataclasses.replace(found.work, conversations=count)
    assert not planner.plan(KIMI, BOX, fits, free_gb=4000).obstacles
    more = dataclasses.replace(found.work, conversations=count + 20)
    assert planner.plan(KIMI, BOX, more, free_gb=4000).obstacles
    assert any("FP8" in way and "still too much" in way for way in obstacle.instead)
    with pytest.raises(planner.DoesNotFit, match="take 33"):
        found.refuse()


def test_fp8_is_offered_as_fitting_only_where_it_fits():
    wide = planner.plan(KIMI, BOX, free_gb=6000)
    assert any("which fits" in way for way in wide.obstacles[0].instead)
    assert not planner.plan(KIMI, BOX, Work(item_bytes=1), free_gb=6000).obstacles


def test_on_the_fly_is_offered_where_half_of_the_gpus_can_serve():
    """B300: the target fits on 4 of 8; RTX PRO 6000: it needs all 8."""
    assert any("on the fly" in way for way in planner.plan(KIMI, "b300-x8", free_gb=100).obstacles[0].instead)
    assert not any("on the fly" in way for way in planner.plan(KIMI, BOX, free_gb=100).obstacles[0].instead)
    beside = planner.plan(KIMI, "b300-x8", Work(stored=False), free_gb=100)
    assert not beside.obstacles
    assert beside.hours["training, states on the fly"].mid > 0
    refused = planner.plan(KIMI, BOX, Work(stored=False))
    assert "8 of the 8 GPUs" in refused.obstacles[0].what
    assert refused.hours == {}


def test_small_gpu_is_refused_with_machines_that_do():
    found = planner.plan(KIMI, "nvidia-h200")
    assert found.total is None
    assert "b300-x8" in found.obstacles[0].instead[0]
    assert "nvidia-a100" not in found.obstacles[0].instead[0]
    assert planner.verdict(found, 2)[0] == "does not fit"


def test_memory_of_head_and_optimiser_by_hand_and_refused():
    """Trained weights 16 bytes, frozen 4; a vocabulary of 32,000 fits where the full one does not."""
    kimi = targets.geometry(KIMI)
    head = head_of(kimi, 163_840)
    parts = planner.training_gb(kimi, head, Work(draft_vocab_size=163_840, batch_tokens=16_384))
    assert parts["trained weights and AdamW"] == pytest.approx(961_544_192 * 16 / 1e9)
    assert parts["logits"] == pytest.approx(16_384 * 163_840 * 4 * 5 / 1e9)
    refused = planner.plan(KIMI, BOX, Work(draft_vocab_size=163_840, batch_tokens=16_384)).obstacles[0]
    assert "a draft vocabulary of 65,536" in refused.instead
    smaller = Work(draft_vocab_size=65_536, batch_tokens=16_384)
    assert not planner.plan(KIMI, BOX, smaller).obstacles
    fewer = int(next(way for way in refused.instead if "tokens a step" in way).split()[0].replace(",", ""))
    assert not planner.plan(KIMI, BOX, Work(draft_vocab_size=163_840, batch_tokens=fewer)).obstacles


def test_streams_are_what_the_cache_holds():
    """96 GB x 0.92 less weights and 4 GB, over 2,048 tokens of 61 x 576 bf16 numbers."""
    kimi = targets.geometry(KIMI)
    room = 96 * 0.92 - planner.target_gb(kimi, 8) - 4
    assert planner.serving(kimi, planner.machine(BOX), Work()).streams == int(room / (2048 * 61 * 576 * 2 / 1e9))
    assert planner.serving(kimi, planner.machine("b200-x8"), Work()).tensor_parallel_size == 8


@pytest.mark.parametrize(
    "wrong",
    [
        {"conversations": 0},
        {"epochs": 0},
        {"item_bytes": 4},
        {"answer_tokens": -1},
        {"batch_tokens": 0},
        {"draft_vocab_size": 0},
    ],
)
def test_amounts_that_are_none_are_refused(wrong):
    with pytest.raises(planner.BadPlan):
        Work(**wrong)


def test_tokens_to_conversations_rounds_up_and_refuses_none():
    assert planner.conversations_for(4097, 2048) == 3
    with pytest.raises(planner.BadPlan):
        planner.conversations_for(100, 2048)


def test_unknown_machine_names_those_there_are():
    with pytest.raises(UnknownHardware, match="b300-x8"):
        planner.plan(KIMI, "abacus")


# --- the threshold and the rented machines


def test_threshold_decides_by_the_whole_interval(plan):
    low, mid, high = (hours / 24 for hours in plan.total)
    assert planner.verdict(plan, high + 0.1)[0] == "train here"
    assert planner.verdict(plan, low - 0.1)[0] == "rent"
    word, why = planner.verdict(plan, (low + mid) / 2)
    assert word == "unclear"
    assert "rather rent" in why
    assert "rather train here" in planner.verdict(plan, (mid + high) / 2)[1]


def test_rented_machines_are_those_of_the_question(plan):
    table = planner.elsewhere(plan.target, plan.work).set_index("machine")
    assert set(table.index) == {"h200-x8", "b200-x8", "b300-x8"}
    assert (table["hours"] < plan.total.mid).all()
    assert table.loc["b300-x8", "hours"] < table.loc["b200-x8", "hours"] < table.loc["h200-x8", "hours"]
    assert table.loc["h200-x8", "gpu_hours"] == pytest.approx(8 * table.loc["h200-x8", "hours"])


def test_every_machine_says_where_its_figures_are_from():
    from labkit.planner.machines import known

    for name in known()["machines"]:
        machine = planner.machine(name)
        assert all(machine.sources[figure] for figure in ("memory_gb", "peak_tflops", "bus_gb_s", "disk_gb_s"))


# --- the file and the command


def test_file_says_all_of_it(plan, tmp_path):
    told = writing.write(tmp_path, plan, rent_after_days=2).read_text()
    assert (tmp_path / "next-steps-eagle.md").exists()
    wanted = ["57,344 bytes a token", "11.77 TB", "32,000 of 163,840", "2, 30, 58; learns from 61", "8x B300"]
    wanted += ["labkit run 04", "vllm serve", "accelerate launch", "speculators.train", "more than 2 days"]
    wanted += [told_range(plan.total), planner.verdict(plan, 2)[1]]
    assert [part for part in wanted if part not in told] == []


def test_extraction_server_of_the_file_has_what_cost_others_days(plan):
    """Traps 6 and 33: no prefix cache, and tensor parallelism alone."""
    told = writing.markdown(plan, rent_after_days=2)
    line = next(line for line in told.splitlines() if "extract_hidden_states" in line)
    assert "--no-enable-prefix-caching" in line
    assert "--tensor-parallel-size 8" in line
    assert "--pipeline-parallel-size" not in line
    assert "without pipeline parallelism" in told


def test_json_and_exit_code_of_the_command(tmp_path):
    runner = CliRunner()
    words = ["plan", "--train", "--target", KIMI, "--hardware", BOX, "--json", "--tokens", "2048000"]
    done = runner.invoke(cli.app, words)
    assert done.exit_code == 0, done.output
    told = json.loads(done.output)
    assert told["data"]["conversations"].startswith("1,000 of")
    assert {row["machine"] for row in told["elsewhere"]} == {BOX, "h200-x8", "b200-x8", "b300-x8"}
    refused = runner.invoke(cli.app, [*words[:-2], "--disk-gb", "100", "--out", str(tmp_path)])
    assert refused.exit_code == 1
    assert "Does not fit" in (tmp_path / "next-steps-eagle.md").read_text()


def test_dense_small_target_can_be_planned():
    found = planner.plan("smollm2", "nvidia-h200", Work(draft_vocab_size=100_000))
    assert found.head.lm_head == 49_152 * 576
    assert not found.obstacles
    assert "Llama" in writing.text(found, 2)
