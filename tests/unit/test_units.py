"""Unit files read and changed: expectations written by hand from systemd.syntax(7), systemd.service(5)."""

import json
import os

import pytest

from labkit import engine, files
from labkit.engine import variants
from labkit.engine.service import flags, systemd, units, words
from labkit.engine.service.plan import plan
from labkit.engine.service.state import State, lock

PLAIN = """# /etc/systemd/system/kimi.service
[Unit]
Description=Kimi
OnFailure=page-someone@%n.service
After=network-online.target

[Service]
User=llm
Environment="VLLM_PORT=8123" HF_HOME=/models
Environment=LONG='a b'
ExecStart=/srv/venv/bin/vllm serve /models/kimi \\
    --tensor-parallel-size 8 \\
    # a remark between
    --speculative_config '{"method": "ngram", "num_speculative_tokens": 2}' \\
    --port ${VLLM_PORT} --host 0.0.0.0
Restart=always
RestartSec=10

[Install]
WantedBy=multi-user.target
"""


def service(exec_start: str, more: str = "") -> str:
    return f"[Service]\n{more}ExecStart={exec_start}\n"


def edited(exec_start: str, changes: dict, dropped: tuple[str, ...] = ()) -> list[str]:
    """The words of ExecStart after a change, as systemd would hand them to the process."""
    text = units.with_flags(service(exec_start), changes, dropped)
    return [word.value for word in units.command(text).words]


def test_logical_lines():
    lines = {(line.section, line.key): line for line in units.lines_of(PLAIN)}
    start = lines["Service", "ExecStart"]
    assert start.value.split()[:3] == ["/srv/venv/bin/vllm", "serve", "/models/kimi"]
    assert start.value.endswith("--port ${VLLM_PORT} --host 0.0.0.0")
    assert "remark" not in start.value
    assert (start.first, start.last) == (10, 14)
    assert lines["Install", "WantedBy"].value == "multi-user.target"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a  b\tc", ["a", "b", "c"]),
        ("\"a b\" 'c d'", ["a b", "c d"]),
        ('x="a b" \'{"k": 1}\'', ["x=a b", '{"k": 1}']),
        (r"a\sb \x", ["a b", r"\x"]),
        (r'"say \"hi\""', ['say "hi"']),
        ("'' end", ["", "end"]),
    ],
)
def test_words_as_systemd_splits_them(text, expected):
    found = words.split(text)
    assert [word.value for word in found] == expected
    assert " ".join(word.raw for word in found) == " ".join(text.split())


@pytest.mark.parametrize(
    "value", ["plain", "two words", '{"a": "b c"}', "it's", "both ' and \"", "back\\slash x", ""]
)
def test_quoting_comes_back(value):
    assert [word.value for word in words.split(words.quoted(value))] == [value]


def test_what_systemd_would_expand_is_doubled_in_what_is_added():
    assert words.quoted("/heads/100%/$x") == "/heads/100%%/$$x"


def test_environment_the_later_counts_and_an_empty_one_resets():
    assert units.environment(PLAIN) == {"VLLM_PORT": "8123", "HF_HOME": "/models", "LONG": "a b"}
    assert units.environment(PLAIN + "[Service]\nEnvironment=\nEnvironment=A=1\n") == {"A": "1"}


def test_environment_file_overrides(tmp_path):
    path = tmp_path / "env"
    path.write_text("# ports\nVLLM_PORT='9000'\n")
    assert units.arguments(PLAIN + f"[Service]\nEnvironmentFile=-{path}\n")["port"] == "9000"


def test_arguments_with_variables():
    found = units.arguments(PLAIN)
    assert (found["port"], found["host"], found["tensor-parallel-size"]) == ("8123", "0.0.0.0", "8")
    assert json.loads(found["speculative-config"])["num_speculative_tokens"] == 2


def test_a_drop_in_replaces_the_command():
    """ExecStart= takes the earlier one back; without it a second command is not a service's."""
    dropin = "[Service]\nExecStart=\nExecStart=/usr/bin/vllm serve other --port 1\n"
    assert units.arguments(PLAIN + dropin) == {"port": "1"}
    with pytest.raises(engine.UnitUnreadable, match="2 ExecStart"):
        units.command(PLAIN + dropin.replace("ExecStart=\n", "", 1))


@pytest.mark.parametrize("start", ["/srv/start.sh", "/srv/vllm/venv/bin/python run.py"])
def test_a_command_that_shows_no_vllm_is_refused(start):
    with pytest.raises(engine.UnitUnreadable, match="no vLLM command"):
        units.command(service(start))


@pytest.mark.parametrize(
    ("before", "changes", "after"),
    [
        ("vllm serve m --port 1", {"seed": 3}, "vllm serve m --port 1 --seed 3"),
        ("vllm serve m --seed=1 --port 1", {"seed": 3}, "vllm serve m --seed 3 --port 1"),
        ("vllm serve --max_model_len 9 m", {"max-model-len": 8}, "vllm serve --max-model-len 8 m"),
        ("vllm serve m -tp 4", {"tensor-parallel-size": 1}, "vllm serve m --tensor-parallel-size 1"),
        ("vllm serve --async-scheduling m", {"no-async-scheduling": True}, "vllm serve --no-async-scheduling m"),
        ("vllm serve m --seed 1 --seed 2 -q fp8", {"seed": 3}, "vllm serve m --seed 3 -q fp8"),
        ("vllm serve m --seed -1 --x", {"seed": 3}, "vllm serve m --seed 3 --x"),
        ("vllm serve m --enable-log-requests", {"enable-log-requests": None}, "vllm serve m"),
        ("-/usr/bin/python -m vllm.entrypoints.openai.api_server --model m", {"seed": 1},
         "-/usr/bin/python -m vllm.entrypoints.openai.api_server --model m --seed 1"),
        ("docker run --rm --name vllm vllm/vllm-openai:v1 --model m", {"seed": 1},
         "docker run --rm --name vllm vllm/vllm-openai:v1 --model m --seed 1"),
    ],
)  # fmt: skip
def test_flags_are_replaced_or_added(before, changes, after):
    assert edited(before, changes) == after.split()


@pytest.mark.parametrize(
    "old",
    [
        '--speculative-config \'{"method": "eagle", "model": "d"}\'',
        "--speculative_config={}",
        "-sc {}",
        "--speculative-config.method eagle --speculative-config.num_speculative_tokens=2",
        "--speculative-model d --num-speculative-tokens 5",
    ],
)
def test_speculation_is_replaced_never_doubled(old):
    found = edited(f"vllm serve m {old} --port 1", variants.own_flags("ngram", variants.LOOKUP, on_cpu=True), SPEC)
    assert [word for word in found if "speculative" in word and word.startswith("-")] == ["--speculative-config"]
    config = json.loads(found[found.index("--speculative-config") + 1])
    assert config == {"method": "ngram"} | variants.LOOKUP, "nothing of the old method stays"
    assert found[found.index("--port") + 1] == "1"
    assert edited(f"vllm serve m {old} --port 1", {}, SPEC) == ["vllm", "serve", "m", "--port", "1"]


SPEC = flags.SPECULATION


def test_objects_are_merged_but_for_speculation():
    found = edited(
        'vllm serve m --compilation-config \'{"mode": 3, "pass_config": {"a": true}}\'',
        {"compilation-config": {"pass_config": {"fuse_allreduce_rms": True}}},
    )
    assert json.loads(found[-1]) == {"mode": 3, "pass_config": {"a": True, "fuse_allreduce_rms": True}}


def test_a_shells_script():
    """The words before vLLM stay as typed; the new flag is quoted twice, for the shell and for systemd."""
    start = "/bin/bash -lc 'source /srv/venv/bin/activate && exec vllm serve \"$MODEL\" --seed 1'"
    config = {"method": "ngram", "num_speculative_tokens": 5}
    *before, script = edited(start, {"speculative-config": config, "seed": 2})
    assert before == ["/bin/bash", "-lc"]
    assert script == (
        'source /srv/venv/bin/activate && exec vllm serve "$MODEL" --seed 2 '
        '--speculative-config \'{"method": "ngram", "num_speculative_tokens": 5}\''
    )
    with pytest.raises(engine.UnitUnreadable, match="followed by another"):
        edited("/bin/sh -c 'vllm serve m ; date'", {"seed": 1})


def test_the_second_unit():
    text = units.second(PLAIN, "kimi.service", "ngram", {"NCCL_PROTO": "LL 128"})
    lines = text.splitlines()
    for gone in ("Restart=always", "OnFailure=page-someone@%n.service", "[Install]", "WantedBy=multi-user.target"):
        assert gone not in lines
    for kept in (
        "User=llm",
        "RestartSec=10",
        'Environment="VLLM_PORT=8123" HF_HOME=/models',
        "    # a remark between",
    ):
        assert kept in lines
    assert lines[-8:] == [
        "# what the lab adds",
        "[Unit]",
        "Description=kimi.service, variant ngram",
        "Conflicts=kimi.service",
        "After=kimi.service",
        "[Service]",
        "Restart=no",
        "Environment='NCCL_PROTO=LL 128'",
    ]
    assert units.environment(text)["NCCL_PROTO"] == "LL 128"


def test_a_templates_instance():
    assert units.instantiated("vllm serve /models/%i %%i %I", "kimi") == "vllm serve /models/kimi %%i kimi"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Units in a folder, and no systemd to ask."""
    monkeypatch.setenv("LABKIT_OUTPUTS", str(tmp_path / "outputs"))
    (tmp_path / "kimi.service").write_text(PLAIN)
    return tmp_path


def planned(folder, variant="ngram", **options):
    return plan("kimi", variant, systemctl=str(folder / "no-systemctl"), unit_dir=folder, **options)


def test_plan_from_a_folder(folder):
    dropins = folder / "kimi.service.d"
    dropins.mkdir()
    (dropins / "20-late.conf").write_text("[Service]\nEnvironment=VLLM_PORT=9\n")
    (dropins / "10-early.conf").write_text("[Service]\nEnvironment=VLLM_PORT=7\n")
    made = planned(folder, num_speculative_tokens=4)
    assert (made.unit, made.url) == ("kimi-ngram.service", "http://127.0.0.1:9")
    config = json.loads(units.arguments(made.after)["speculative-config"])
    assert config == {
        "method": "ngram",
        "num_speculative_tokens": 4,
        "prompt_lookup_max": 4,
        "prompt_lookup_min": 1,
    }
    assert made.unit_path.stat().st_mode & 0o077 == 0, "a unit may hold keys"
    assert made.notes == ("systemd was not asked: the plan comes from the unit file alone",)
    assert type(made).of_json(json.loads(json.dumps(made.as_json()))).to_start() == made.to_start()


def test_only_what_was_asked_for_changes(folder):
    """The lab's own base (model length, seed, ...) is not pressed on somebody's service."""
    assert units.arguments(planned(folder, "baseline").after) == {
        "tensor-parallel-size": "8",
        "port": "8123",
        "host": "0.0.0.0",
    }
    changed = units.arguments(planned(folder, "single-rank", max_model_len=99).after)
    assert (changed["tensor-parallel-size"], changed["max-model-len"]) == ("1", "99")
    with pytest.raises(engine.UnknownVariant, match="port"):
        planned(folder, port=1)


def test_keys_are_not_shown(folder):
    (folder / "kimi.service").write_text(
        PLAIN.replace("--host", "--api-key s3cret --host").replace("HF_HOME=/models", "HF_TOKEN=s3cret")
    )
    made = planned(folder)
    assert "s3cret" not in str(made) + made._repr_markdown_() + json.dumps(made.as_json())
    assert made.after.count("s3cret") == 2


@pytest.mark.parametrize(
    ("more", "url"),
    [("", "http://127.0.0.1:8000"), ("--port 1 --host ::", "http://127.0.0.1:1"),
     ("--port 1 --host 10.0.0.7", "http://10.0.0.7:1"), ("--port 1 --ssl-certfile c", "https://127.0.0.1:1")],
)  # fmt: skip
def test_the_address(folder, more, url):
    (folder / "kimi.service").write_text(service(f"vllm serve m {more}"))
    assert planned(folder).url == url


def test_a_port_that_the_unit_does_not_say(folder):
    (folder / "kimi.service").write_text(service("vllm serve m --port ${ELSEWHERE}"))
    with pytest.raises(engine.NoPort, match="ELSEWHERE"):
        planned(folder)
    assert planned(folder, url="host:7000/v1").url == "http://host:7000"


def test_how_systemctl_is_called(folder):
    made = plan("kimi", "ngram", systemctl=f"sudo -n {folder}/no-systemctl", user=True, unit_dir=folder)
    install, reload = made.to_install()
    assert install[:3] == ["sudo", "-n", "install"]
    assert install[-2:] == [str(made.unit_path), str(folder / "kimi-ngram.service")]
    assert reload == ["sudo", "-n", f"{folder}/no-systemctl", "--user", "daemon-reload"]
    assert made.to_restore()[1] == ["sudo", "-n", "rm", "-f", str(folder / "kimi-ngram.service")]


def said_by_systemctl(tmp_path, *lines: str) -> systemd.Manager:
    path = tmp_path / "systemctl"
    path.write_text("#!/bin/sh\n" + "".join(f"echo {line}\n" for line in lines))
    path.chmod(0o755)
    return systemd.Manager((str(path),))


@pytest.mark.parametrize(
    ("lines", "state"),
    [
        (["LoadState=loaded", "ActiveState=active"], "active"),
        (["LoadState=not-found", "ActiveState=inactive"], "not-found"),
        (["LoadState=not-found", "ActiveState=failed"], "failed"),
        (["LoadState=loaded", "ActiveState=inactive"], "inactive"),
        (["LoadState=loaded", "ActiveState=inactive", "Job=17"], "activating"),
        (["LoadState=loaded", "ActiveState=active", "Job=17"], "active"),
    ],
)
def test_the_state_of_a_unit(tmp_path, lines, state):
    """A unit whose start waits for another one is inactive to systemd, but it did not end."""
    assert said_by_systemctl(tmp_path, *lines).state("x.service") == state


def test_the_state_file_is_whole_for_whoever_reads_it(folder):
    made = planned(folder)
    state = State(made.folder)
    state.begin(made)
    with state.path.open() as early:
        state.note("ready", must=True)
        assert json.load(early)["phase"] == "begun", "a new file, renamed over the old one"
    assert [phase for phase, _ in state.read()["history"]] == ["begun", "ready"]


def test_what_cannot_be_written_keeps_no_original_away(folder):
    """A broken state file stands for a full disk: what somebody waits for raises, all else is passed over."""
    state = State(folder)
    state.path.write_text("{")
    state.note("restoring")
    with pytest.raises(files.BrokenFile):
        state.note("ready", must=True)


def test_one_lock_a_service(folder):
    first = lock(folder)
    assert lock(folder) is None
    os.close(first)
    os.close(lock(folder))
