"""The sweep of notebook 05: turns, what is kept, points by hand, crossover, standing, which head."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
from sse_server import ROLE, Reply, delta, serving, usage

from labkit import bench, draft, engine, evaluation, files, settings
from labkit.acceptance import from_positions
from labkit.bench.rows import frame
from labkit.engine import sampling
from labkit.evaluation import candidates as lineup
from labkit.evaluation import standing as room
from labkit.evaluation.measuring import Measured
from labkit.evaluation.predicting import Predictor
from labkit.plots import evaluation as plots
from labkit.settings import BadParameter, Evaluation

IDS = [delta(ids=[i], content=f"w{i} ") for i in range(1, 4)]
ANSWER = Reply([ROLE | {"prompt_token_ids": [5, 6]}, *IDS, delta("stop", ids=[4], content="."), usage(4)])
NO_TIMES = pd.DataFrame(columns=bench.steptimes.COLUMNS)
UNTIMED = Predictor(NO_TIMES, None, Path("head"))
PROMPTS = pd.DataFrame(
    {"prompt_id": [f"p{i}" for i in range(4)], "category": "c", "messages": [f"question {i}" for i in range(4)]}
)


def scripted(name, log):
    """A script that notes who was asked what."""

    def script(path, body):
        log.append((name, body["messages"][0]["content"] if "messages" in body else ""))
        return ANSWER

    return script


def together(servers, prompts, folder, **options):
    attached = {name: engine.attach(fake.url) for name, fake in servers.items()}
    journals = {name: folder / f"{name}.jsonl" for name in servers}
    return bench.run_together(attached, prompts, journals, **({"max_tokens": 8, "repeats": 1} | options))


def test_servers_take_turns_prompt_by_prompt_and_who_begins_goes_round(tmp_path):
    log = []
    with serving(scripted("a", log)) as a, serving(scripted("b", log)) as b:
        sides = together({"a": a, "b": b}, PROMPTS, tmp_path, repeats=2, warmup=0)
    pairs = [log[i : i + 2] for i in range(0, len(log), 2)]
    assert [[name for name, _ in pair] for pair in pairs] == [["a", "b"], ["b", "a"]] * 4
    assert all(first[1] == second[1] for first, second in pairs), "a pair is of one prompt"
    frames = [sides[name].frame(bench.as_prompts(PROMPTS)) for name in "ab"]
    assert [len(rows) for rows in frames] == [8, 8]
    keys = ["prompt_id", "repeat", "session"]
    pd.testing.assert_frame_equal(frames[0][keys], frames[1][keys])  # marked as pairs in time
    assert frames[0]["session"].nunique() == 8


def test_with_more_in_flight_a_turn_is_a_whole_repeat_and_counts_are_the_servers_own(tmp_path):
    log = []

    def metrics():
        n = len([name for name, _ in log if name == "b"])
        told = {"spec_decode_num_drafts": 2 * n, "spec_decode_num_draft_tokens": 6 * n}
        told |= {"spec_decode_num_accepted_tokens": n, "generation_tokens": 4 * n, "request_success": n}
        return "".join(f"vllm:{name}_total {value}\n" for name, value in told.items())

    with serving(scripted("a", log)) as a, serving(scripted("b", log), metrics) as b:
        sides = together({"a": a, "b": b}, PROMPTS, tmp_path, repeats=2, warmup=0, concurrency=2)
    assert [name for name, _ in log] == ["a"] * 4 + ["b"] * 8 + ["a"] * 4
    assert sides["a"].counts == []
    assert [(found.drafts, found.accepted) for found in sides["b"].counts] == [(8, 4), (8, 4)]


def test_what_a_journal_holds_is_not_sent_again(tmp_path):
    log = []
    with serving(scripted("a", log)) as a, serving(scripted("b", log)) as b:
        together({"a": a}, PROMPTS.head(3), tmp_path, warmup=0)
        log.clear()
        sides = together({"a": a, "b": b}, PROMPTS, tmp_path, warmup=0)
    assert sorted(log) == [("a", "question 3"), *(("b", f"question {i}") for i in range(4))]
    assert len(sides["a"].kept) == 4


def attached(tmp_path, monkeypatch, **given):
    monkeypatch.setattr("labkit.evaluation.measuring.steptimes.kept", lambda *args, **more: NO_TIMES)
    monkeypatch.setenv("LABKIT_OUTPUTS", str(tmp_path))
    return Evaluation(run_id="r", repeats=1, max_tokens=8, max_model_len=64, **given)


def test_attached_servers_are_measured_by_turns_and_only_once(tmp_path, monkeypatch):
    log = []
    head = tmp_path / "head"
    with serving(scripted("a", log)) as a, serving(scripted("b", log)) as b:
        chosen = attached(tmp_path, monkeypatch, server=a.url, variant_server=b.url)
        measured = evaluation.sweep(chosen, head, PROMPTS, PROMPTS.iloc[:0])
        first = [entry for entry in log if entry[1].startswith("question")]
        assert sorted(first[2:]) == sorted((name, f"question {i}") for name in "ab" for i in range(4))
        assert {first[0][0], first[1][0]} == {"a", "b"}  # the warm-up
        log.clear()
        again = evaluation.sweep(chosen, head, PROMPTS, PROMPTS.iloc[:0])
    assert log == []
    pd.testing.assert_frame_equal(measured.everything[["prompt_id", "k"]], again.everything[["prompt_id", "k"]])
    assert measured.rows(chosen).groupby("variant").size().to_dict() == {"baseline": 4, "eagle3": 4}
    assert measured.compared["identical"].tolist() == [True] * 4
    table = evaluation.points(measured, Predictor(measured.times, None, head), 0)
    assert table.set_index("variant").loc["eagle3", "side_by_side"] == 1


def test_without_a_server_for_the_head_only_the_baseline_is_measured(tmp_path, monkeypatch):
    with serving(scripted("a", [])) as a:
        chosen = attached(tmp_path, monkeypatch, server=a.url)
        measured = evaluation.sweep(chosen, tmp_path / "head", PROMPTS, PROMPTS.iloc[:0])
    assert set(measured.everything["variant"]) == {"baseline"}
    assert measured.best_k == chosen.num_speculative_tokens
    table = evaluation.points(measured, Predictor(measured.times, None, a), 0)
    assert "nothing can be said of streams" in evaluation.crossover_sentence(table, 3)
    assert evaluation.shown(evaluation.greedy(table, 3)).empty
    plots.plot_by_streams(evaluation.greedy(table, 3), evaluation.crossover(table, 3)["low"])
    said = evaluation.conclusion(
        chosen, measured, evaluation.speedups(measured.everything, ["eagle3"], 0), table, {}, None
    )
    assert "measure the head: `-p variant_server=...`" in said


def row(variant, k, streams, prompt, category, ms, temperature=0.0, **more):
    """A request of 11 tokens, `ms` each after the first."""
    timed = {"tpot_ms": ms, "decode_ms": 10 * ms, "ttft_ms": 5.0, "e2e_ms": 5 + 10 * ms, "started_s": 0.0}
    told = {"variant": variant, "prompt_id": prompt, "category": category, "repeat": 0, "concurrency": streams}
    told |= {"tokens_timed": 11, "tokens_total": 11, "tokens_source": "usage", "chunks": 11, "session": prompt}
    marks = {"k": k, "streams": streams, "temperature": temperature}
    return frame([told | timed | more]).assign(**marks)


def made(rows, counts=None, times=None, best_k=2):
    times = pd.DataFrame(columns=bench.steptimes.COLUMNS) if times is None else times
    return Measured(pd.concat(rows, ignore_index=True), counts or {}, times, pd.DataFrame(), best_k, "by hand")


def swept():
    """Baseline 20 ms a token, n-gram 16; the head 10 at one stream (8 on code), 25 at four, on two categories."""
    rows = []
    for i, category in enumerate(["code", "code", "story", "story"]):
        name = f"{category}{i}"
        rows += [row("baseline", 0, streams, name, category, 20.0) for streams in (1, 4)]
        rows.append(row("ngram", 5, 1, name, category, 16.0))
        mine = {"drafts": 10, "drafted": 20, "accepted": 15, "accepted_at": [9, 6]}
        rows.append(row("eagle3", 2, 1, name, category, 8.0 if category == "code" else 10.0, **mine))
        rows.append(row("eagle3", 2, 4, name, category, 25.0))
    return rows


def test_points_are_paired_at_their_own_streams():
    counts = {("eagle3", 2, 4, 0.0): from_positions([5, 3], drafts=10)}
    table = evaluation.points(made(swept(), counts), UNTIMED, 0)
    found = table.set_index(["variant", "k", "streams"])
    one, four = found.loc[("eagle3", 2, 1)], found.loc[("eagle3", 2, 4)]
    assert one["speedup"] == pytest.approx((20 / 8 + 20 / 10) / 2)  # the median of 2.5, 2.5, 2, 2
    assert (one["speedup_low"], one["speedup_high"]) == pytest.approx((2.0, 2.5))
    assert one["over_ngram"] == pytest.approx((16 / 8 + 16 / 10) / 2)
    assert four["speedup"] == pytest.approx(0.8)
    assert math.isnan(four["over_ngram"]), "n-gram was not measured at four streams"
    assert (one["verdict"], four["verdict"]) == ("go", "no-go")
    assert one["acceptance_length"] == pytest.approx(2.5)
    assert four["acceptance_length"] == pytest.approx(1.8), "from the server's counters"
    assert one["tok_s"] == pytest.approx(40 / (10 * (8 + 8 + 10 + 10) / 1e3))
    assert four["side_by_side"] == 1
    assert found.loc[("ngram", 5, 1), "speedup"] == pytest.approx(1.25)
    assert math.isnan(found.loc[("baseline", 0, 1), "speedup"])


def test_categories_have_verdicts_of_their_own_and_no_counts_that_are_of_all():
    counts = {("eagle3", 2, 4, 0.0): from_positions([5, 3], drafts=10)}
    table = evaluation.by_category(made(swept(), counts), UNTIMED, 0).set_index(["category", "variant", "streams"])
    assert table.loc[("code", "eagle3", 1), "speedup"] == pytest.approx(2.5)
    assert table.loc[("story", "eagle3", 1), "speedup"] == pytest.approx(2.0)
    assert math.isnan(table.loc[("code", "eagle3", 4), "acceptance_length"])


def line(streams, low, mid, high, k=2):
    point = {"variant": "eagle3", "k": k, "streams": streams, "temperature": 0.0, "verdict": "x"}
    return point | {"speedup_low": low, "speedup": mid, "speedup_high": high}


def test_crossover_is_where_the_interval_reaches_one():
    table = pd.DataFrame(
        [
            line(1, 1.5, 1.6, 1.7),
            line(2, 1.2, 1.3, 1.4),
            line(4, 0.95, 1.05, 1.1),
            line(8, 0.8, 0.9, 1.02),
            line(16, 0.6, 0.7, 0.8),
            line(4, 9, 9, 9, k=5),  # another k says nothing
        ]
    )
    assert evaluation.crossover(table, 2) == {"low": 4, "mid": 8, "high": 16}
    said = evaluation.crossover_sentence(table, 2)
    assert all(text in said for text in ("**from 4 streams on**", "from 8 streams", "from 16 streams"))
    assert evaluation.crossover(table.head(2), 2)["low"] == math.inf
    assert "up to 2: **go**" in evaluation.crossover_sentence(table.head(2), 2)


def test_prediction_is_length_over_cost():
    """t(1) = 10 ms, t(3) = 12 ms, 1 ms a drafted token at best: 2.5 tokens a step of 14 ms."""
    times = pd.DataFrame({"n": [1, 2, 3], "streams": 1, "step_ms": [10.0, 11.0, 12.0]})
    times = times.assign(low_ms=times["step_ms"], high_ms=times["step_ms"])
    predictor = Predictor(times, None, "h")
    predictor.steps = bench_steps(times)
    rows = pd.concat(swept()[i] for i in (3, 8))
    found = predictor.of(rows, from_positions([18, 12], drafts=20), 2, 1)
    assert found["predicted"] == pytest.approx(2.5 * 10 / 14)
    assert found["step_ms_predicted"] == pytest.approx(14)
    assert math.isnan(predictor.of(rows, from_positions([18, 12], drafts=20), 2, 4)["predicted"]), "t at 4 unknown"


def bench_steps(times):
    from labkit import costmodel

    return costmodel.calibrate(times, draft_ms=1.0)


def test_a_sweep_is_read_and_refused():
    demo, full = Evaluation(), Evaluation(scale="full")
    assert (demo.ks, demo.streams, demo.sweep_temperature) == ([1, 3, 5], [1, 4, 16], 0.7)
    assert (full.ks, full.streams) == ([1, 2, 3, 4, 5], [1, 2, 4, 8, 16, 32])
    assert full.tokens_a_step == 32 * 6
    smoke = Evaluation(scale="smoke", num_speculative_tokens=2)
    assert (smoke.ks, smoke.streams, smoke.sweep_temperature) == ([2], [1], 0.0)
    assert Evaluation(sweep_k="4, 2", sweep_temperature=0).ks == [2, 3, 4]
    assert Evaluation(server="http://x:1", variant_server="http://y:1").streams == [1]
    for bad in ({"sweep_k": "two"}, {"sweep_streams": "0"}, {"side_by_side": "maybe"}):
        with pytest.raises(BadParameter, match=next(iter(bad))):
            Evaluation(**bad)
    with pytest.raises(BadParameter, match="sweep_k"):
        Evaluation(variant_server="http://y:1", sweep_k="1,2")


def test_candidates_follow_notebook_02_and_what_is_attached(tmp_path):
    files.write_json(
        tmp_path / "run.json",
        {"settings": {"num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 2}},
    )
    found = lineup.candidates(Evaluation(sweep_k="2"), tmp_path, [tmp_path])
    assert list(found) == ["baseline", "ngram", "eagle3-k2", "eagle3-k3"]
    assert found["ngram"].options == {"num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 2}
    alone = lineup.candidates(Evaluation(server="http://x:1"), tmp_path)
    assert [name for name, each in alone.items() if each.measurable] == ["baseline"]


@pytest.mark.parametrize(
    ("asked", "scale", "free_gb", "servers"),
    [
        ("auto", "full", 30, "all"),
        ("auto", "full", 27, "pair"),
        ("auto", "full", 7, "none"),
        ("auto", "smoke", 30, "none"),
        ("yes", "smoke", 1, "pair"),
        ("yes", "smoke", 30, "all"),
        ("no", "full", 99, "none"),
    ],
)
def test_servers_stand_side_by_side_where_memory_lets(monkeypatch, tmp_path, asked, scale, free_gb, servers):
    """Seven servers of 4 GB each: 28 GB hold all, 8 a pair."""
    monkeypatch.setattr(room.launch, "on_cpu", lambda: True)
    monkeypatch.setattr(room, "cores", lambda: 8)
    memory = SimpleNamespace(available=(free_gb + room.CPU_SPARE_GB) * 1e9, total=99e9)
    monkeypatch.setattr(room.psutil, "virtual_memory", lambda: memory)
    target = SimpleNamespace(path=tmp_path)
    (tmp_path / "w.safetensors").write_bytes(bytes(10))
    found = room.standing(Evaluation(scale=scale, side_by_side=asked), target, 7, [])
    assert (found.servers, found.gpu_share) == (servers, 0.0)
    files.write_json(tmp_path / "run.json", {})
    if asked == "auto":
        assert room.standing(Evaluation(scale=scale), target, 7, [tmp_path]).servers == "none"
    monkeypatch.setattr(room, "cores", lambda: 2)
    two_cores = room.standing(Evaluation(scale="full"), target, 7, [])
    assert two_cores.servers == ("pair" if free_gb >= 8 else "none")
    assert "2 cores" in two_cores.why
    attached = room.standing(Evaluation(scale=scale, side_by_side=asked), None, 2, [])
    assert attached.servers == ("none" if asked == "no" else "all")


def test_a_gpu_is_dealt_out(monkeypatch, tmp_path):
    monkeypatch.setattr(room.launch, "on_cpu", lambda: False)
    monkeypatch.setattr(room.holders, "ask", lambda query: [["143000", "143771"], ["80000", "143771"]])
    target = SimpleNamespace(path=tmp_path)
    found = room.standing(Evaluation(scale="full"), target, 7, [])
    assert found.servers == "all"
    assert found.gpu_share == pytest.approx(0.85 * 80000 / 143771 / 7)  # the fuller GPU decides
    total, free = 143771 * 2**20 / 1e9, 80000 * 2**20 / 1e9
    assert found.cache_gb == pytest.approx(0.85 * free / 7 - room.GPU_SERVER_GB)
    assert found.flags == {
        "gpu-memory-utilization": round(0.85 * free / total / 7, 4),
        "kv-cache-memory-bytes": int(found.cache_gb * 1e9),
    }
    many = room.standing(Evaluation(scale="full"), target, 20, [])
    assert (many.servers, many.gpu_share) == ("pair", pytest.approx(0.85 * 80000 / 143771 / 2))


def test_the_head_is_found_by_name_directory_and_fallback(tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_ROOT", str(tmp_path))
    shipped = tmp_path / "data" / "heads" / "tiny-eagle3"
    files.write_json(shipped / "config.json", {})
    run = tmp_path / "run"
    assert draft.locate("tiny-eagle3") == shipped
    assert draft.locate("", run, "tiny") == shipped
    assert "shipped head tiny-eagle3, since no head was given" in draft.origin("", shipped)
    files.write_json(run / "04_eagle3_pipeline" / "head" / "config.json", {})
    assert draft.locate("", run, "tiny") == run / "04_eagle3_pipeline" / "head"
    assert draft.locate(str(shipped.parent)) == shipped.parent
    with pytest.raises(draft.NoHead, match="ships none for other"):
        draft.locate("", None, "other")
    with pytest.raises(draft.NoHead, match="tiny-eagle3"):
        draft.locate("no-such-name")


def test_a_hub_id_comes_from_the_hubs_cache_and_failures_are_named(tmp_path, monkeypatch):
    """The client's own cache layout, offline: no network is asked."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for name, kept in (("good", ["config.json", "model.safetensors"]), ("pickled", ["config.json"])):
        folder = tmp_path / f"models--owner--{name}"
        (folder / "refs").mkdir(parents=True)
        (folder / "refs" / "main").write_text("a" * 40)
        for file in kept:
            path = folder / "snapshots" / ("a" * 40) / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("{}")
    monkeypatch.setattr("huggingface_hub._snapshot_download.constants.HF_HUB_CACHE", str(tmp_path))
    assert (draft.locate("owner/good") / "model.safetensors").exists()
    with pytest.raises(draft.NoHead, match=r"no config\.json with safetensors"):
        draft.locate("owner/pickled")
    with pytest.raises(draft.NoHead, match="could not be fetched"):
        draft.locate("owner/absent")


def test_the_eagle3_variant_serves_the_shipped_head(tmp_path, monkeypatch):
    from labkit.engine.server import head_of

    monkeypatch.setenv("LABKIT_ROOT", str(tmp_path))
    files.write_json(tmp_path / "data" / "heads" / "tiny-eagle3" / "config.json", {})
    target = SimpleNamespace(name="tiny")
    assert head_of(target, "eagle3", {}) == {"head": str(tmp_path / "data" / "heads" / "tiny-eagle3")}
    assert head_of(target, "eagle3", {"head": tmp_path}) == {"head": str(tmp_path)}
    assert head_of(target, "ngram", {}) == {}
    with pytest.raises(draft.NoHead):
        head_of(SimpleNamespace(name="other"), "eagle3", {})
    assert settings.root() == tmp_path


def test_a_stage_is_outdated_when_its_shipped_head_changes(tmp_path, monkeypatch):
    from labkit.runs.execute import brought

    monkeypatch.setenv("LABKIT_ROOT", str(tmp_path))
    files.write_json(tmp_path / "data" / "heads" / "tiny-eagle3" / "config.json", {})
    before = brought(Evaluation(head="tiny-eagle3"))
    files.write_json(tmp_path / "data" / "heads" / "tiny-eagle3" / "config.json", {"changed": 1})
    assert brought(Evaluation(head="tiny-eagle3")) != before
    assert brought(Evaluation(head="owner/tiny-eagle3")) == []


class Starts:
    """Fake servers instead of vLLM: who was started, how many stood at the same time, who was asked."""

    def __init__(self, stack, monkeypatch, slow_k):
        self.log, self.started, self.most, self.standing = [], [], 0, set()
        self.stack, self.slow_k = stack, slow_k
        monkeypatch.setattr("labkit.evaluation.rig.engine.on_demand", self.on_demand)
        monkeypatch.setattr(
            "labkit.evaluation.rig.targets.resolve", lambda name: SimpleNamespace(path=Path("none"))
        )
        monkeypatch.setattr("labkit.evaluation.measuring.steptimes.kept", lambda *args, **more: NO_TIMES)

    @contextlib.contextmanager
    def on_demand(self, target, variant, *, url="", **options):
        name = variant + str(options.get("num_speculative_tokens", "") if variant == "eagle3" else "")
        delay = 0.02 if name in self.slow_k else 0.0
        slower = Reply(
            [ROLE | {"prompt_token_ids": [5, 6]}, *(x for i in IDS for x in (i, delay)), *ANSWER.events[4:]]
        )

        def script(path, body):
            self.log.append((name, body["temperature"], body["max_tokens"]))
            return slower

        def get():
            if name not in self.standing:
                self.started.append(name)
                self.standing.add(name)
                self.most = max(self.most, len(self.standing))
                fakes.append(self.stack.enter_context(serving(script)))
            return engine.attach(fakes[-1].url)

        fakes = []
        yield SimpleNamespace(get=get)
        self.standing.discard(name)


@pytest.mark.parametrize(
    ("side_by_side", "slow", "started", "most"),
    [
        ("all", ("eagle31", "eagle33"), ["baseline", "ngram", "eagle31", "eagle32", "eagle33"], 5),
        ("none", ("eagle31", "eagle33"), ["eagle31", "eagle32", "eagle33", "eagle32", "baseline", "ngram"], 1),
        ("pair", ("eagle31", "eagle32"), ["eagle31", "eagle32", "baseline", "eagle33", "ngram"], 2),
    ],
)
def test_each_server_starts_once_but_for_a_best_k_that_was_not_the_settings(
    tmp_path, monkeypatch, side_by_side, slow, started, most
):
    monkeypatch.setenv("LABKIT_OUTPUTS", str(tmp_path))
    monkeypatch.setattr(sampling, "BROKEN", {} if side_by_side != "none" else sampling.BROKEN)
    hot = [(1, 0.7)] if side_by_side != "none" else []  # the CPU engine of the tests cannot sample and speculate
    found = room.Standing(side_by_side, 0.0, "")
    monkeypatch.setattr("labkit.evaluation.measuring.standing", lambda *args: found)
    given = {"scale": "full", "run_id": "r"}
    chosen = Evaluation(repeats=1, sweep_repeats=1, max_tokens=8, sweep_k="1,2", sweep_streams="2", **given)
    with contextlib.ExitStack() as stack:
        starts = Starts(stack, monkeypatch, slow)
        measured = evaluation.sweep(chosen, tmp_path / "head", PROMPTS.head(2), PROMPTS.iloc[:0])
        assert (starts.started, starts.most) == (started, most)
        count = len(starts.log)
        again = evaluation.sweep(chosen, tmp_path / "head", PROMPTS.head(2), PROMPTS.iloc[:0])
        assert len(starts.log) == count, "what was measured is kept"
    best = 3 if "eagle33" not in slow else 2
    assert measured.best_k == again.best_k == best
    rows = measured.everything
    points = set(rows[["variant", "k", "streams", "temperature"]].itertuples(index=False, name=None))
    ones = {("eagle3", k, 1, 0.0) for k in (1, 2, 3)}
    more = {(v, k, *at) for v, k in (("baseline", 0), ("ngram", 5), ("eagle3", best)) for at in [(2, 0.0), *hot]}
    assert points == ones | more | {("baseline", 0, 1, 0.0), ("ngram", 5, 1, 0.0)}
    turns = measured.rows(chosen).groupby("variant")["session"].apply(set)
    assert (turns["baseline"] == turns["eagle3"]) == (side_by_side != "none"), "pairs in time"


def test_servers_that_share_a_gpu_start_at_once_after_the_first(tmp_path, monkeypatch):
    """One that fails beside the others is started again alone."""
    from labkit.evaluation.rig import Rig

    monkeypatch.setattr("labkit.evaluation.rig.targets.resolve", lambda name: None)
    rig = Rig(Evaluation(), {}, [])
    together, tries, lock = threading.Barrier(2, timeout=20), [], threading.Lock()

    def get(name):
        with lock:
            tries.append(name)
            count = tries.count(name)
        if name != "a" and count == 1:
            together.wait()  # both stand here at the same time, or this fails
        if name == "c" and count == 1:
            raise engine.EngineFailed("no memory", "wait")
        return name

    rig.servers = {name: SimpleNamespace(get=lambda name=name: get(name)) for name in "abc"}
    rig.flags = {"gpu-memory-utilization": 0.1}
    assert rig.started(["a", "b", "c"]) == {"a": "a", "b": "b", "c": "c"}
    assert tries[0] == "a"
    assert tries.count("c") == 2


def test_step_times_of_notebook_02_are_used(tmp_path, monkeypatch):
    from labkit.evaluation.rig import Rig
    from labkit.settings import NgramBaseline

    monkeypatch.setenv("LABKIT_OUTPUTS", str(tmp_path))
    monkeypatch.setattr("labkit.evaluation.rig.targets.resolve", lambda name: None)
    calls = []

    def timed(server, ns, **options):
        calls.append(list(ns))
        return pd.DataFrame({"n": list(ns), "streams": 1, "step_ms": 1.0}).reindex(columns=list(NO_TIMES))

    monkeypatch.setattr("labkit.bench.steptimes.step_times", timed)
    server, earlier = SimpleNamespace(get=lambda: None), NgramBaseline(scale="smoke", run_id="r")
    bench.steptimes.kept(earlier, server, earlier.num_speculative_tokens + 1)
    chosen = Evaluation(scale="smoke", run_id="r")
    at = Rig(chosen, {}, []).at(chosen.concurrency, 0.0, chosen.repeats)
    found = bench.steptimes.kept(at, server, 6, also=[earlier.folder])
    assert calls == [[1, 2, 3, 4, 5, 6]]
    assert found["n"].tolist() == [1, 2, 3, 4, 5, 6]
    bench.steptimes.kept(at, server, 6, points={4: (1, 3)}, also=[earlier.folder])
    assert calls[1:] == [[1, 3]]


@pytest.mark.parametrize("near", [True, False])
def test_words_that_differ_are_no_go_whatever_the_speed(near):
    chosen = Evaluation(sweep_k="2", num_speculative_tokens=2, sweep_streams="1")
    rows = [row("baseline", 0, 1, f"p{i}", "c", 20.0) for i in range(6)]
    rows += [row("eagle3", 2, 1, f"p{i}", "c", 10.0 + i / 10, drafts=5, drafted=10, accepted=5) for i in range(6)]
    compared = pd.DataFrame({"identical": [False, True], "near_tie": pd.array([near, None], "boolean")})
    measured = dataclasses.replace(made(rows), compared=compared)
    points = evaluation.points(measured, UNTIMED, 0)
    categories = evaluation.by_category(measured, UNTIMED, 0)
    told = evaluation.sweep_headline(measured, points, categories, chosen)
    assert told.get("verdict") == (None if near else "no-go")
    speedups = evaluation.speedups(measured.everything, ["eagle3"], 0)
    said = evaluation.conclusion(chosen, measured, speedups, points, {}, None)
    assert said.startswith("**go**") == near
    assert ("serve the head with" if near else "do not serve this head") in said.split("**Next")[1]
    assert ("1 outputs differ from greedy by more than a near-tie" in said) != near
