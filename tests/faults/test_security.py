"""Loopback only, no code of a model's own, keys only from the environment: as written, and as it behaves."""

from __future__ import annotations

import ast
import json
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from labkit import bench, engine, experts, extract, files, settings, targets
from labkit.engine import launch, urls, variants
from labkit.errors import LabError
from labkit.extract import reference
from labkit.runs import dry
from tests.faults import phases
from tests.unit.sse_server import ROLE, Reply, delta, serving, usage

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [*ROOT.glob("labkit/**/*.py"), *ROOT.glob("benchmarks/*.py"), *ROOT.glob("notebooks/*.ipynb")]
KEY = "sk-a-secret-of-this-test"
NEEDED = {"head": "h", "layers": [1, 2, 3], "storage": "s", "trace_dir": "t"}


def options_of(variant: str) -> dict[str, Any]:
    """Options with which a variant can be written down."""
    known = {name for each in variants.lineage(variant) for name in each.options}
    return variants.options_of(variant, {name: value for name, value in NEEDED.items() if name in known})


@pytest.mark.parametrize("variant", variants.VARIANTS)
def test_every_server_listens_on_loopback(variant: str, tmp_path: Path) -> None:
    words = launch.command(tmp_path, "m", variant, 8000, options_of(variant))
    assert [words[i + 1] for i, word in enumerate(words) if word == "--host"] == ["127.0.0.1"]
    gpu = dry.argv("owner/model", variant, options_of(variant))
    assert [gpu[i + 1] for i, word in enumerate(gpu) if word == "--host"] == ["127.0.0.1"]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "127.0.0.1", ""])
def test_a_server_of_the_lab_is_never_opened_to_the_network(host: str) -> None:
    with pytest.raises(engine.UnknownVariant, match="flags name the host"):
        variants.options_of("baseline", {"flags": {"host": host}})


def test_what_was_started_listens_where_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the whole tree of processes, supervisor included."""
    monkeypatch.setattr(launch, "command", launch.command)
    phases.stand_in()
    with phases.serving(tmp_path) as server:
        top = psutil.Process(server.process.pid)
        found = [c for each in [top, *top.children(recursive=True)] for c in each.net_connections("inet")]
    listening = {c.laddr.ip for c in found if c.status == psutil.CONN_LISTEN}
    assert listening == {"127.0.0.1"}


def test_jupyter_is_opened_on_loopback_with_its_token() -> None:
    recipe = (ROOT / "Makefile").read_text()
    lines = [line for line in recipe.splitlines() if re.search(r"jupyter[- ](lab|notebook|server)", line)]
    assert lines
    assert all("--ip 127.0.0.1" in line for line in lines)
    assert not re.search(r"token\s*=|password\s*=|allow_origin|disable_check_xsrf|0\.0\.0\.0", recipe)
    as_root = [line for line in recipe.splitlines() if "allow-root" in line]
    assert all('"$$(id -u)" != 0 ] || echo --allow-root' in line for line in as_root)  # for root alone


def test_nothing_in_the_lab_listens_on_all_addresses() -> None:
    """As an address: text that tells a person of it apart."""
    opened = re.compile(r"""["'](0\.0\.0\.0|::|\*)["']""")
    bound = [path.name for path in SOURCES if opened.search(path.read_text()) and "bind(" in path.read_text()]
    assert not bound


def test_no_source_lets_a_models_own_code_run() -> None:
    """Neither on (trust_remote_code) nor by unpickling; loaders that would ask on a terminal are told no."""
    for path in SOURCES:
        text = path.read_text()
        on = re.findall(r"trust[_-]remote[_-]code\W{0,4}\s*(?:True|1\b|true)", text)
        assert len(on) == (path.name == "commands.py"), path  # there a line that a person may run elsewhere
        assert not re.search(r"\bpickle\.loads?\(|\ballow_pickle=True|weights_only=False", text), path
        assert not re.search(r"\b(import|from) (pickle|dill|cloudpickle)|(?<!\.)\b(eval|exec)\(", text), path
        for call in re.findall(r"torch\.load\([^)]*\)", text):
            assert "weights_only=True" in call, path
    for name in ("targets/sources.py", "extract/reference.py", "experts/recording.py", "train/onthefly.py"):
        text = (ROOT / "labkit" / name).read_text()
        assert text.count("trust_remote_code=False") == len(re.findall(r"\w\.from_pretrained\(", text)), name


CODE = """
from pathlib import Path
Path({mark!r}).write_text("ran")
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
class OwnConfig(LlamaConfig):
    model_type = "own_kind"
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def own_code(tmp_path: Path) -> tuple[targets.Target, Path]:
    """A model directory that brings code, and the file that the code would write."""
    target, mark = phases.target(tmp_path), tmp_path / "ran"
    (target.path / "own.py").write_text(CODE.format(mark=str(mark)))
    kinds = {"AutoConfig": "own.OwnConfig", "AutoModel": "own.OwnModel", "AutoModelForCausalLM": "own.OwnModel"}
    config = files.read_json(target.path / "config.json")
    more = {"model_type": "own_kind", "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    files.write_json(target.path / "config.json", config | more | {"auto_map": kinds})
    tokenizer = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["own.OwnTokenizer", None]}}
    files.write_json(target.path / "tokenizer_config.json", tokenizer)
    return target, mark


LOADS = {
    "tokenizer": lambda target: target.tokenizer(),
    "states": lambda target: reference.load(target),
    "routing": lambda target: experts.recording.load(target),
}


@pytest.mark.parametrize("kind", LOADS)
@pytest.mark.parametrize("answer", ["y\n", ""])
def test_a_models_own_code_never_runs_and_nobody_is_asked(
    own_code: tuple[targets.Target, Path], kind: str, answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where somebody would answer yes: the loader must not ask."""
    target, mark = own_code
    asked: list[object] = []
    monkeypatch.setattr("builtins.input", lambda *prompt: asked.append(prompt) or answer.strip())
    with pytest.raises(LabError) as refused:
        LOADS[kind](target)
    assert refused.value.remedy
    assert not mark.exists()
    assert not asked


def test_a_servers_command_never_trusts_a_models_code(tmp_path: Path) -> None:
    for variant in variants.VARIANTS:
        words = launch.command(tmp_path, "m", variant, 8000, options_of(variant))
        assert not any("trust" in word for word in words)


# Keys


def test_every_client_has_the_key_a_bound_on_answers_and_a_time_limit() -> None:
    """Made by urls.options and with a hook; bare httpx.get only where a server of our own is waited for."""
    clients = 0
    for path in (ROOT / "labkit").rglob("*.py"):
        for call in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)):
            name = ast.unparse(call.func)
            if name in ("httpx.get", "httpx.post", "httpx.request", "httpx.stream"):
                assert path.name == "server.py", f"{path}: use engine.urls.get or post"
            if name in ("httpx.Client", "httpx.AsyncClient"):
                clients += 1
                around = path.read_text()
                assert "options(" in around, path
                assert None in {word.arg for word in call.keywords}, f"{path}: **urls.options(url) is missing"
                assert "timeout" in around, path
                assert "HOOKS" in around, path
    assert clients >= 8


@pytest.mark.parametrize(
    "url", [f"http://user:{KEY}@host:8000", f"https://{KEY}@host/v1", f"user:{KEY}@host:1", f"http://u:{KEY}@[x:y"]
)
def test_an_address_with_a_password_is_refused_without_showing_it(url: str) -> None:
    with pytest.raises(urls.BadUrl, match="LABKIT_API_KEY") as refused:
        urls.base_url(url)
    assert KEY not in str(refused.value)
    for name, parameter in (("02_ngram_baseline", "server"), ("05_evaluation", "variant_server")):
        with pytest.raises(LabError, match="LABKIT_API_KEY") as refused:
            settings.NOTEBOOKS[name].of({parameter: url})
        assert KEY not in str(refused.value)


def test_the_key_goes_to_the_server_and_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tables, journal, run.json, launch specs, printed text and errors, also of a server that echoes it."""
    monkeypatch.setenv("LABKIT_API_KEY", KEY)
    monkeypatch.setenv("LABKIT_OUTPUTS", str(tmp_path))
    seen: list[str] = []
    answer = Reply([ROLE, delta(content="a"), 0.01, delta("stop"), usage(2)])

    def script(_path: str, body: dict[str, Any]) -> Reply:
        echo = body["messages"][0]["content"] == "echo"
        return Reply(status=401, body={"error": f"Incorrect API key: {KEY}"}) if echo else answer

    with serving(script) as server:
        real = server.plain
        server.plain = lambda handler, *a, **k: (
            seen.append(handler.headers["Authorization"]),
            real(handler, *a, **k),
        )
        table = bench.run(
            server.url, ["hi", "echo"], max_tokens=4, repeats=1, warmup=0, journal=tmp_path / "rows.jsonl"
        )
        with pytest.raises(bench.NothingMeasured) as refused:
            bench.run(server.url, ["echo"], max_tokens=4, repeats=1, warmup=0)
    assert f"Bearer {KEY}" in seen
    assert KEY not in str(refused.value)
    from labkit.runs import Stage

    made = Stage(settings.NOTEBOOKS["02_ngram_baseline"].of({"run_id": "r", "server": server.url}))
    made.save("rows", table)
    made.finish({"a": 1})
    monkeypatch.setattr(launch, "command", launch.command)
    phases.stand_in()
    with phases.serving(tmp_path / "served"):
        pass
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(written) > 4
    assert not [path for path in written if KEY.encode() in path.read_bytes()]
    told = capsys.readouterr()
    assert KEY not in told.out + told.err


def test_no_notebook_has_a_parameter_for_a_key() -> None:
    for kind in settings.NOTEBOOKS.values():
        assert not [name for name in kind.parameters() if re.search(r"key|token$|secret|password", name)]


# Files that servers name


@pytest.mark.parametrize(
    "place", ["other.safetensors", "../model/model.safetensors", "/etc/passwd", "", 5, ["x"], {}]
)
def test_a_hostile_server_cannot_have_a_file_taken(tmp_path: Path, place: Any) -> None:
    """What an extraction reads, moves and removes is the file of its own request, and no other."""
    target, data = phases.target(tmp_path), tmp_path / "data"
    import pandas as pd

    frame = pd.DataFrame({"input_ids": [[1, 2, 3]], "seq_len": 3, "prompt_tokens": 1, "split": "train"})
    files.write_parquet(data / "dataset.parquet", frame)
    folder = tmp_path / "storage"
    folder.mkdir()
    own = folder / "other.safetensors"
    own.write_bytes(b"somebody's")
    (folder / "other.safetensors.lock").touch()
    path = str(folder / place) if isinstance(place, str) and place else place
    reply, said = Reply(body={"kv_transfer_params": {"hidden_states_path": path}}), r"hidden_states_path|not that"
    with serving(lambda *_: reply) as server, pytest.raises(LabError, match=said):
        extract.run(data, server.url, tmp_path / "out", target=target, layers="1,2,3")
    assert own.read_bytes() == b"somebody's"
    assert (target.path / "model.safetensors").exists()


def test_a_port_of_the_labs_is_found_on_loopback() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert launch.port_taken(taken.getsockname()[1])
    assert 0 < launch.free_port() < 65536


def test_provenance_and_records_hold_no_environment(tmp_path: Path) -> None:
    """Another process with secrets in its environment writes a stage: none of them is in it."""
    code = (
        "from labkit import settings; from labkit.runs import Stage\n"
        "Stage(settings.NOTEBOOKS['03_expert_activation'].of({'run_id': 'r'})).finish({})"
    )
    secrets = dict.fromkeys(
        ("HF_TOKEN", "OPENAI_API_KEY", "VLLM_API_KEY", "LABKIT_API_KEY", "AWS_SECRET_ACCESS_KEY"), KEY
    )
    environment = phases.environment() | secrets | {"LABKIT_OUTPUTS": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    record = (tmp_path / "r" / "03_expert_activation" / "run.json").read_text()
    assert json.loads(record)["headline"] == {}
    assert KEY not in record
