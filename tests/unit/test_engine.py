"""Engine without an engine: addresses, variants as data, diagnosis, and the supervisor over stand-in processes."""

import json
import os
import shlex
import signal
import socket
import ssl
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from labkit import engine, targets
from labkit.engine import diagnosis, holders, launch, urls, variants
from labkit.engine import server as server_module
from labkit.engine import supervisor as supervisor_module


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("http://host:8000", "http://host:8000/v1"),
        ("http://host:8000/", "http://host:8000/v1"),
        ("http://host:8000/v1", "http://host:8000/v1"),
        ("http://host:8000/v1/", "http://host:8000/v1"),
        ("http://host:8000/v1/v1", "http://host:8000/v1"),
        ("host:8000", "http://host:8000/v1"),
        (" https://gate.example/llm/v1/ ", "https://gate.example/llm/v1"),
        ("http://[::1]:8000", "http://[::1]:8000/v1"),
    ],
)
def test_all_forms_of_an_address_mean_the_same(typed, expected):
    assert urls.base_url(typed) == expected
    assert urls.root_url(typed) == expected.removesuffix("/v1")


@pytest.mark.parametrize("typed", ["", "ftp://host", "http://", "/v1"])
def test_what_is_no_address_is_refused(typed):
    with pytest.raises(urls.BadUrl):
        urls.base_url(typed)


def test_certificates_are_read_once_and_looked_at():
    """Reading them took most of a request's time; a client without them would trust anybody."""
    made_with = [
        urls.options(url) for url in ("http://127.0.0.1:1/v1", "http://localhost:2/v1", "https://host/v1")
    ]
    contexts = [one["verify"] for one in made_with]
    assert contexts[0] is contexts[1]
    assert all(one.verify_mode == ssl.CERT_REQUIRED and one.check_hostname for one in contexts)
    assert [one["trust_env"] for one in made_with] == [False, False, True]


def flag(words: list[str], name: str) -> str:
    return words[words.index(f"--{name}") + 1]


def test_ngram_gives_the_minimum_always():
    """With only the maximum, vLLM takes it as the minimum too and proposes almost nothing."""
    words = variants.arguments(variants.flags_of("ngram", variants.options_of("ngram", {}), on_cpu=True))
    config = json.loads(flag(words, "speculative-config"))
    assert config == {
        "method": "ngram",
        "num_speculative_tokens": 5,
        "prompt_lookup_max": 4,
        "prompt_lookup_min": 1,
    }


def test_extract_uses_the_connector_of_the_device(tmp_path):
    options = variants.options_of("extract", {"layers": [2, 15, 27, 30], "storage": tmp_path})
    on_cpu, on_gpu = (
        json.loads(
            flag(variants.arguments(variants.flags_of("extract", options, on_cpu=cpu)), "kv-transfer-config")
        )
        for cpu in (True, False)
    )
    assert on_cpu["kv_connector_module_path"] == "labkit.connector"
    assert on_gpu["kv_connector"] == "ExampleHiddenStatesConnector"
    assert "kv_connector_module_path" not in on_gpu


def test_variants_and_options_are_checked():
    with pytest.raises(engine.UnknownVariant, match="baseline"):
        variants.options_of("turbo", {})
    with pytest.raises(engine.UnknownVariant, match="kk"):
        variants.options_of("ngram", {"kk": 3})
    with pytest.raises(engine.UnknownVariant, match="head"):
        variants.options_of("eagle3", {})


def rows_of(table) -> dict[str, tuple[str, str]]:
    return {row.setting: (row.before, row.after) for row in table.itertuples()}


def test_a_child_inherits_and_overrides():
    """ngram-seed is ngram with another minimum; ngram-gpu keeps its lookup and changes the method alone."""
    config = {
        name: json.loads(flag(words_of(name), "speculative-config"))
        for name in ("ngram", "ngram-seed", "ngram-gpu")
    }
    assert config["ngram-seed"] == config["ngram"] | {"prompt_lookup_min": 4}
    assert config["ngram-gpu"] == config["ngram"] | {"method": "ngram_gpu"}


def words_of(variant: str, **options) -> list[str]:
    return variants.arguments(variants.flags_of(variant, variants.options_of(variant, options), on_cpu=True))


def test_what_a_variant_changes_is_shown_before_it_runs(tmp_path):
    assert rows_of(variants.diff("baseline")) == {}
    assert rows_of(variants.diff("baseline-sync")) == {"--no-async-scheduling": ("", "on")}
    (name, (before, after)) = rows_of(variants.diff("ngram")).popitem()
    assert (name, before) == ("--speculative-config", "")
    assert json.loads(after)["prompt_lookup_max"] == 4
    changed = rows_of(
        variants.diff("eagle3", head=tmp_path, max_model_len=99, environment={"A": 1}, flags={"seed": 7})
    )
    assert set(changed) == {"--speculative-config"}, "what both sides are given is no difference"
    assert rows_of(variants.diff("nccl-allreduce"))["--tensor-parallel-size"] == ("1", "2")
    with pytest.raises(variants.UnknownVariant):
        variants.diff("turbo")
    with pytest.raises(variants.UnknownVariant):
        variants.diff("baseline", against="turbo")


def test_changes_are_options_that_a_shell_takes(tmp_path):
    """An attached server is said to need what the lab would have started; a started one what it has."""
    head = tmp_path / "my head"
    for attached, begins in (("", "What `eagle3` changes"), ("http://gpu:8001", "The lab does not see how")):
        told = variants.changes("eagle3", attached, head=head, environment={"MODE": "a b"})
        assert told.startswith(begins)
        (line,) = told.split("```")[1].strip().splitlines()
        name, value = shlex.split(line)
        assert (name, json.loads(value)["model"]) == ("--speculative-config", str(head))
        assert "gpu" not in told
    assert "\n--no-async-scheduling\n" in variants.changes("baseline-sync")
    assert "\nnothing\n" in variants.changes("baseline")


@pytest.mark.parametrize(
    "inherited", ["", "/t/libgomp-a34b.so.1", "/x/libtcmalloc.so.4:/t/libgomp.so.1:/l/libiomp5.so"]
)
def test_one_openmp_runtime_is_preloaded(monkeypatch, inherited):
    """vLLM refuses GNU's beside Intel's; it leaves the former behind in a process that made a configuration."""
    monkeypatch.setenv("LD_PRELOAD", inherited)
    names = [Path(name).name for name in launch.preload()["LD_PRELOAD"].split(":")]
    assert names[0] == "libiomp5.so"
    assert names[1:] == ["libtcmalloc.so.4"] * ("tcmalloc" in inherited)


def test_environment_and_flags_reach_the_process(tmp_path, monkeypatch):
    """The command line and variables that a server would be started with, any vLLM flag among them."""
    started = {}
    monkeypatch.setattr(launch, "start", lambda words, extra, log_path: started.update(words=words, extra=extra))
    target = targets.Target("t", tmp_path, "made up")
    options = variants.options_of(
        "ngram", {"environment": {"NCCL_PROTO": "LL"}, "flags": {"reasoning-parser": "x"}}
    )
    server_module.launch_server(target, "ngram", options, tmp_path)
    assert started["extra"]["NCCL_PROTO"] == "LL"
    assert flag(started["words"], "reasoning-parser") == "x"


def test_every_variant_can_be_given():
    required = {"head": "h", "layers": [1], "storage": "s", "trace_dir": "t"}
    for name in variants.VARIANTS:
        needed = {
            option for each in variants.lineage(name) for option, value in each.options.items() if value is ...
        }
        assert words_of(name, **{option: required[option] for option in needed})


def test_cores_are_dealt_out_to_ranks(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    assert launch.cores_by_rank(2) == "0,1|2,3"
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {4, 6})
    assert launch.cores_by_rank(2) == "4|6"


def test_taken_port_is_refused(tmp_path):
    from labkit import targets

    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(engine.PortInUse, match=str(port)), engine.serve(targets.resolve("smollm2"), port=port):
            pass


@pytest.mark.parametrize("kind", [str, Path])
def test_the_logs_folder_is_text_or_a_path(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(launch, "command", lambda *_: ["sleep", "60"])
    options = {"log_dir": kind(tmp_path / "logs"), "start_limit_s": 0.0}
    with pytest.raises(engine.EngineFailed, match="not ready after 0 s"), engine.serve("smollm2", **options):
        pass
    assert (tmp_path / "logs" / "server-baseline.log").exists()


def test_importing_the_engine_takes_no_data_libraries():
    """The guard of a swap and `labkit swap` import it, and every second counts there."""
    code = "import sys, labkit.engine; print(*({'pandas', 'numpy', 'torch', 'nbformat'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == ""


def test_nothing_answers():
    with pytest.raises(engine.ServerUnreachable, match=r"127\.0\.0\.1"):
        engine.attach(f"http://127.0.0.1:{launch.free_port()}")


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("OSError: [Errno 98] Address already in use", "port"),
        ("torch.OutOfMemoryError: CUDA out of memory", "memory"),
        ("OSError: [Errno 28] No space left on device", "disk"),
        (
            "ValueError: Total number of attention heads (9) must be divisible by tensor parallel size (2)",
            "tensor-parallel",
        ),
        ("safetensors_rust.SafetensorError: Error while deserializing header: HeaderTooLarge", "damaged"),
        ("ModuleNotFoundError: No module named 'triton'", "package"),
        ("something never seen before", "unknown"),
    ],
)
def test_log_to_likely_cause(tmp_path, said, reason):
    log = tmp_path / "server.log"
    log.write_text(f"INFO start\n{said}\nINFO end\n")
    assert reason in diagnosis.cause(log)[0]
    assert said in diagnosis.tail(log)


TREE = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
print(child.pid, flush=True)
time.sleep(120)
"""


def start_tree(tmp_path, owner: psutil.Process) -> tuple[subprocess.Popen, psutil.Process, psutil.Process]:
    """A supervisor over a parent with a child: (supervisor, parent, child)."""
    spec = {"command": [sys.executable, "-c", TREE], "environment": {}, "owner": owner.pid}
    spec_path = tmp_path / "spec.json"
    spec_path.write_text(json.dumps(spec | {"owner_started": supervisor_module.started(owner.pid)}))
    words = [sys.executable, "-P", supervisor_module.__file__, str(spec_path)]
    supervisor = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True)
    child = psutil.Process(int(supervisor.stdout.readline()))
    return supervisor, child.parent(), child


def wait_gone(*processes: psutil.Process, seconds: float = 20) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes):
            return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_server_main_process_ends_and_the_rest_follows(tmp_path, how):
    supervisor, parent, child = start_tree(tmp_path, psutil.Process())
    parent.send_signal(how)
    assert wait_gone(parent, child)
    assert supervisor.wait(timeout=20) == 128 + how


def test_supervisor_told_to_stop_takes_all_along(tmp_path):
    supervisor, parent, child = start_tree(tmp_path, psutil.Process())
    supervisor.terminate()
    assert wait_gone(parent, child)
    supervisor.wait(timeout=20)


def test_owner_killed_takes_all_along(tmp_path):
    owner = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
    supervisor, parent, child = start_tree(tmp_path, psutil.Process(owner.pid))
    owner.kill()  # and not waited for: a zombie owner is a dead owner
    assert wait_gone(parent, child)
    supervisor.wait(timeout=20)
    owner.wait()


def test_supervisor_killed_takes_all_along(tmp_path):
    """kill -9 of the supervisor itself: also the grandchild ends, which no signal on a parent's death reaches."""
    supervisor, parent, child = start_tree(tmp_path, psutil.Process())
    (sentinel,) = (each for each in psutil.Process(supervisor.pid).children() if each.pid != parent.pid)
    supervisor.kill()
    supervisor.wait()
    assert wait_gone(parent, child, sentinel)


def test_an_interrupt_while_the_process_starts_leaves_none(tmp_path, monkeypatch):
    """Ctrl-C between fork and return: nobody holds the process yet that could stop it."""
    made = []

    class Interrupted(subprocess.Popen):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            made.append(psutil.Process(self.pid))
            raise KeyboardInterrupt

    monkeypatch.setattr(launch.subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        server_module.started(["sleep", "60"], {}, tmp_path / "server.log")
    _, left = psutil.wait_procs(made, timeout=20)
    assert made
    assert not left


def test_a_supervisor_in_somebodys_session_ends_nobody_else(tmp_path):
    """Started by hand in a shell's session, its sentinel must not end the shell."""
    words = [sys.executable, "-c", SHELL, str(tmp_path)]
    shell = subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True)
    supervisor, parent = map(int, shell.stdout.readline().split())
    os.kill(supervisor, signal.SIGKILL)
    assert wait_gone(*(psutil.Process(pid) for pid in (supervisor, parent) if psutil.pid_exists(pid)))
    time.sleep(1)
    assert shell.poll() is None
    shell.kill()
    shell.wait()


SHELL = """
import json, psutil, subprocess, sys, time
from pathlib import Path
from labkit.engine import supervisor
me = psutil.Process()
spec = {"command": ["sleep", "120"], "environment": {}, "owner": me.pid}
spec["owner_started"] = supervisor.started(me.pid)
path = Path(sys.argv[1]) / "spec.json"
path.write_text(json.dumps(spec))
started = subprocess.Popen([sys.executable, "-P", supervisor.__file__, str(path)])
while not (found := [p for p in psutil.Process(started.pid).children() if p.name() == "sleep"]):
    time.sleep(0.1)
print(started.pid, found[0].pid, flush=True)
time.sleep(120)
"""

SMI = """#!{python} -I
import pathlib, sys, time
here = pathlib.Path(__file__).parent
used = (here / "used").read_text().split()  # MiB of one GPU by call: the last one stays
query = sys.argv[1]
if "memory.used" in query and "compute-apps" not in query:
    print(f"0, {{used[0]}}")
    if len(used) > 1:
        (here / "used").write_text(" ".join(used[1:]))
elif query == "--query-gpu=index,uuid":
    print("0, GPU-aa")
else:
    print((here / "apps").read_text(), end="")
"""


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """An nvidia-smi on PATH that tells what the test says: (MiB by call, processes)."""
    path = tmp_path / "nvidia-smi"
    path.write_text(SMI.format(python=sys.executable))
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def says(used: str, apps: str = "") -> None:
        (tmp_path / "used").write_text(used)
        (tmp_path / "apps").write_text(apps)

    return says


def test_memory_that_a_servers_processes_will_give_back(smi):
    me = os.getpid()
    smi("70000", f"GPU-aa, {me}, 60000\nGPU-aa, 1, 8000\nGPU-bb, {me}, 1\n")
    assert holders.without([me]) == {0: 10000}
    assert holders.without([]) == {0: 70000}


def test_waits_while_memory_is_freed_then_starts(smi, tmp_path):
    smi("70000 40000 10400 10300")
    holders.wait_back({0: 10000}, 10)
    assert (tmp_path / "used").read_text() == "10300", "over, over, then within 512 MiB twice"
    smi("9000 5000 100 100 100")
    holders.wait_back({0: 10000}, 10)
    assert (tmp_path / "used").read_text() == "100", "below already, but still falling"


def test_whoever_keeps_the_memory_is_named(smi):
    me = os.getpid()
    smi("30000", f"GPU-aa, {me}, 29000\n")
    with pytest.raises(engine.GpuMemoryHeld) as failure:
        holders.wait_back({0: 10000}, 0.2)
    for part in (
        "GPU 0 uses 30000 MiB",
        "10000 MiB were expected",
        f"pid {me}",
        psutil.Process().username(),
        "29000",
    ):
        assert part in str(failure.value)


def test_the_next_server_waits_for_the_last_ones_memory(smi, tmp_path, monkeypatch):
    """Two starts: memory that did not come back stops the next one, before anything is started."""
    sleeper = subprocess.Popen(["sleep", "60"])
    smi("30000", f"GPU-aa, {sleeper.pid}, 20000\n")
    engine.Server("http://127.0.0.1:1/v1", "m", process=sleeper).stop()
    assert sleeper.returncode == -signal.SIGTERM
    started = []
    monkeypatch.setattr(launch, "start", lambda *words: started.append(words))
    monkeypatch.setattr(holders, "MEMORY_LIMIT_S", 0.2)
    target, options = targets.Target("t", tmp_path, "made up"), variants.options_of("baseline", {})
    with pytest.raises(engine.GpuMemoryHeld, match="10000 MiB were expected"):
        server_module.launch_server(target, "baseline", options, tmp_path)
    assert not started
    server_module.launch_server(target, "baseline", options, tmp_path)
    assert len(started) == 1, "said once: a person may go on"


def test_without_a_gpu_nothing_is_waited_for(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert holders.used() == {}
    holders.wait_back(holders.without([1]), 0.0)


def test_who_listens_on_a_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        (who,) = holders.of_port(listener.getsockname()[1])
    assert (who.pid, who.user) == (os.getpid(), psutil.Process().username())
    assert "pytest" in who.command
