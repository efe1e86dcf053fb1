"""Servers that are given by address: away, swapped, or of another kind than they were given for."""

import dataclasses
import re
from contextlib import ExitStack
from types import SimpleNamespace

import pandas as pd
import pytest
from sse_server import BREAK, ROLE, Reply, delta, serving, usage

from labkit import bench, engine, files, runs
from labkit.bench import attached
from labkit.engine import launch
from labkit.errors import LabError
from labkit.settings import NgramBaseline

PLAIN = Reply([ROLE, delta("a", ids=[1]), delta("b", ids=[2]), usage(3, 2)])
KINDS = {"plain": 0, "k=5": 5, "k=3": 3, "silent": None}


def page(k):
    """What vLLM's /metrics has before any request: with a draft position each where it speculates."""
    if k is None:
        return "process_cpu_seconds_total 1.0\n"
    lines = ['vllm:generation_tokens_total{engine="0"} 0.0']
    if k:
        names = ("drafts", "draft_tokens", "accepted_tokens")
        lines += [f'vllm:spec_decode_num_{name}_total{{engine="0"}} 0.0' for name in names]
        lines += [
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="{i}"}} 0.0'
            for i in range(k)
        ]
    return "\n".join(lines) + "\n"


@pytest.fixture
def pair(tmp_path, monkeypatch):
    """A function that sets servers of two kinds up: notebook 02's settings for them, and the servers."""
    monkeypatch.setenv("LABKIT_OUTPUTS", str(tmp_path))
    with ExitStack() as stack:

        def made(server, variant="", **more):
            found = [
                stack.enter_context(serving(lambda *_: PLAIN, (lambda k: lambda: page(k))(KINDS[kind])))
                for kind in (server, variant)
                if kind
            ]
            names = dict(zip(("server", "variant_server"), [each.url for each in found], strict=False))
            return NgramBaseline(run_id="r", **names, **more), found

        yield made


PROMPTS = pd.DataFrame(
    {"prompt_id": ["a"], "category": ["x"], "messages": [[{"role": "user", "content": "?"}]], "source": ["s"]}
)


@pytest.mark.parametrize(
    ("server", "variant", "says"),
    [
        ("k=5", "plain", "swapped"),
        ("plain", "plain", "does not speculate"),
        ("plain", "k=3", "num_speculative_tokens=3"),
        ("k=5", "k=3", "num_speculative_tokens=3"),
    ],
)
def test_a_wrong_pair_is_refused_before_the_first_request(pair, server, variant, says):
    settings, servers = pair(server, variant)
    with pytest.raises(attached.WrongServer, match=says) as error:
        bench.measure_variant(settings, "baseline", PROMPTS)
    assert settings.variant_server in error.value.what
    assert [each.requests for each in servers] == [[], []]


@pytest.mark.parametrize(("server", "variant"), [("plain", "k=5"), ("silent", "silent"), ("plain", "silent")])
def test_a_right_pair_and_servers_that_do_not_tell_are_measured(pair, server, variant, recwarn):
    settings, servers = pair(server, variant, max_tokens=2, repeats=1)
    assert len(bench.measure_variant(settings, "baseline", PROMPTS)) == 1
    assert len(bench.measure_variant(settings, "ngram", PROMPTS)) == 1
    assert all(each.requests for each in servers)
    assert not [str(each.message) for each in recwarn if "speculates" in str(each.message)]


def test_somebodys_own_server_that_speculates_is_measured_with_a_warning(pair):
    settings, _ = pair("k=3", max_tokens=2, repeats=1)
    with pytest.warns(UserWarning, match=r"speculates already \(3 tokens a draft\)"):
        assert len(bench.measure_variant(settings, "baseline", PROMPTS)) == 1


def test_two_models_are_told(pair):
    settings, servers = pair("plain", "k=5", max_tokens=2, repeats=1)
    servers[1].pages["/v1/models"] = {"data": [{"id": "acme", "root": "/models/acme"}]}
    with pytest.warns(UserWarning, match="server serves toy, variant_server serves .*acme"):
        bench.measure_variant(settings, "ngram", PROMPTS)


@pytest.mark.parametrize("name", ["server", "variant_server"])
@pytest.mark.parametrize("number", ["02", "05", "all"])
def test_an_address_where_nothing_answers_stops_before_a_kernel_starts(pair, number, name, tmp_path):
    settings, servers = pair("plain", "k=5")
    dead = f"http://127.0.0.1:{launch.free_port()}"
    given = {"server": settings.server, "variant_server": settings.variant_server, "run_id": "r"} | {name: dead}
    with pytest.raises(engine.ServerUnreachable, match=re.escape(f"{name}={dead}")):
        runs.run_all(given) if number == "all" else runs.execute(number, given)
    assert not any(tmp_path.iterdir())
    assert [each.requests for each in servers] == [[], []]


@pytest.mark.parametrize(("value", "says"), [("ftp://x", "no http address"), ("http://127.0.0.1:0", "answers")])
def test_a_wrong_address_names_its_parameter(pair, value, says):
    with pytest.raises(LabError, match=f"variant_server={value}.*{says}"):
        attached.require_answers(NgramBaseline(run_id="r", server=pair("plain")[0].server, variant_server=value))


def test_a_model_that_is_not_there_is_refused_with_those_that_are(pair):
    settings, _ = pair("plain", model="llama-3")
    with pytest.raises(engine.ServerUnreachable, match="no model 'llama-3'") as error:
        runs.execute("02", {"server": settings.server, "model": "llama-3", "run_id": "r"})
    assert "toy" in error.value.remedy


def test_a_server_whose_rows_are_there_may_be_away(pair):
    """Rows are kept when a server has gone; those of a measurement that broke off are not enough."""
    settings, _ = pair("plain")
    dead = f"http://127.0.0.1:{launch.free_port()}"
    away = NgramBaseline(run_id="r", server=settings.server, variant_server=dead)
    measured = away.folder / "measured"
    files.write_parquet(measured / "ngram-incomplete.parquet", PROMPTS)
    with pytest.raises(engine.ServerUnreachable):
        attached.require_answers(away)
    files.write_parquet(measured / "ngram-0-1.parquet", PROMPTS)
    attached.require_answers(away)
    with pytest.raises(engine.ServerUnreachable):
        attached.require_answers(SimpleNamespace(server=dead, variant_server="", model="", folder=away.folder))


@pytest.mark.parametrize(("drafts", "refused"), [(9, False), (6, True)])
def test_a_head_drafts_in_every_step(drafts, refused):
    """Ten steps of a request: 1 + 10 + what was accepted tokens."""
    counts = {"drafts": drafts, "drafted": 3 * drafts, "accepted": 7, "tokens_total": 18, "chunks": 11}
    rows = pd.DataFrame([counts | {"error": None}])
    if not refused:
        attached.refuse_another_method(rows, "http://x")
        return
    with pytest.raises(attached.WrongServer, match="60% of its steps"):
        attached.refuse_another_method(rows, "http://x")


FOUR = pd.concat([PROMPTS.assign(prompt_id=name) for name in "abcd"], ignore_index=True)


@pytest.mark.parametrize("forced", [False, True])
def test_an_attached_pair_is_measured_by_turns_and_once(pair, monkeypatch, forced):
    """The baseline's step asks both, prompt by prompt; the variant's finds its rows, also under --force."""
    settings, servers = pair("plain", "k=5", max_tokens=2, repeats=2)
    if forced:
        bench.measure_baseline(settings, FOUR, 1)
        bench.measure_variant(settings, "ngram", FOUR, **settings.lookup)
        monkeypatch.setenv("LABKIT_FORCE", "1")
        for each in servers:
            each.sent_at.clear(), each.requests.clear()
    rows, _ = bench.measure_baseline(settings, FOUR, 1)
    asked = len(servers[1].requests)
    assert asked == 1 + 8, "a warm-up, and each prompt twice"
    found = bench.measure_variant(settings, "ngram", FOUR, **settings.lookup)
    assert len(servers[1].requests) == asked
    assert (len(rows), len(found), set(rows.variant), set(found.variant)) == (8, 8, {"baseline"}, {"ngram"})
    turns = sorted([(at, 0) for at in servers[0].sent_at[1:9]] + [(at, 1) for at in servers[1].sent_at[1:9]])
    order = [side for _, side in turns]
    assert all({*order[at : at + 2]} == {0, 1} for at in range(0, 16, 2)), order


def asked_of(server):
    """Requests of the benchmark; step times have prompts of their own."""
    return sum(body.get("messages") == PROMPTS.messages[0] for body in server.requests)


def test_rows_that_one_of_the_pair_has_are_kept(pair):
    settings, servers = pair("plain", "k=5", max_tokens=2, repeats=1)
    alone = dataclasses.replace(settings, variant_server="")
    bench.measure_baseline(alone, FOUR, 1)
    asked = asked_of(servers[0])
    bench.measure_baseline(settings, FOUR, 1)
    assert asked_of(servers[0]) == asked
    assert len(bench.measure_variant(settings, "ngram", FOUR, **settings.lookup)) == 4


def test_a_server_that_goes_in_the_middle_costs_only_its_own_rest(pair):
    settings, servers = pair("plain", "k=5", max_tokens=2, repeats=1)
    answers = iter([PLAIN] * 3)
    servers[1].script = lambda *_: next(answers, Reply([ROLE, BREAK]))
    bench.measure_baseline(settings, FOUR, 1)
    assert bench.measure_variant(settings, "ngram", FOUR, **settings.lookup)["error"].notna().sum() == 2
    asked = [asked_of(each) for each in servers]
    servers[1].script = lambda *_: PLAIN
    bench.measure_baseline(settings, FOUR, 1)
    found = bench.measure_variant(settings, "ngram", FOUR, **settings.lookup)
    assert found["error"].isna().all()
    assert asked_of(servers[0]) == asked[0], "its rows were whole"
    assert asked_of(servers[1]) - asked[1] == 1 + 2, "a warm-up and what was missing"
