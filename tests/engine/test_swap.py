"""The swap of a systemd service: real server processes behind a stand-in for systemctl (tests/engine/standin).

systemd itself does not run where the lab is tested. What is killed, held or broken here is real all the same.
"""

import dataclasses
import json
import multiprocessing
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest

from labkit import acceptance, engine
from labkit.engine import launch, urls
from labkit.engine.service import state
from labkit.engine.service import swap as swap_module

STANDIN = Path(__file__).parent / "standin"
SOAK = os.environ.get("LABKIT_SOAK") == "1"
KILLS = 20 if SOAK else 3
UNIT = """[Unit]
Description=a model
[Service]
Environment=LOAD_S={load_s} {more}
ExecStart={start} \\
    --port {port}
Restart=always
TimeoutStopSec={stop_s}
StandardOutput=append:{log}
[Install]
WantedBy=multi-user.target
"""


class Machine:
    """A service that runs under the stand-in, in a folder of its own."""

    def __init__(self, home: Path, more: str = "", load_s: float = 0.2, start: str = "", stop_s: int = 20):
        self.home, self.port = home, launch.free_port()
        for folder in ("units", "state", "bin"):
            (home / folder).mkdir()
        for name in ("systemctl", "vllm"):
            path = home / "bin" / name
            path.write_text(f"#!{sys.executable} -I\n" + (STANDIN / f"{name}.py").read_text())
            path.chmod(0o755)
        self.systemctl, self.vllm, self.log = str(home / "bin" / "systemctl"), home / "bin" / "vllm", home / "log"
        start = start or f"{self.vllm} serve a-model"
        places = {"port": self.port, "log": self.log, "stop_s": stop_s}
        unit = UNIT.format(load_s=load_s, more=more, start=start, **places)
        (home / "units" / "llm.service").write_text(unit)
        self.call("start", "llm.service")

    @property
    def outputs(self) -> Path:
        return self.home / "outputs"

    @property
    def swaps(self) -> Path:
        return self.outputs / "swaps" / "llm"

    @property
    def phase(self) -> str:
        path = self.swaps / "state.json"
        return json.loads(path.read_text())["phase"] if path.exists() else ""

    def call(self, *words: str) -> None:
        subprocess.run([self.systemctl, *words], check=True)

    def plan(self, **options) -> engine.SwapPlan:
        places = {"systemctl": self.systemctl, "unit_dir": self.home / "units", "patience_s": 1.5}
        return engine.plan("llm", "ngram", **places, load_limit_s=30.0, **options)

    def model(self) -> str:
        """plain, speculating, or nothing when nobody answers."""
        try:
            reply = urls.get(f"http://127.0.0.1:{self.port}/v1/models", timeout=2)
            return reply.json()["data"][0]["id"]
        except httpx.HTTPError:
            return ""

    def wait_answer(self, limit_s: float = 30) -> None:
        deadline = time.monotonic() + limit_s
        while self.model() != "plain":
            assert time.monotonic() < deadline, f"the original does not answer; phase {self.phase}"
            time.sleep(0.1)

    def servers(self) -> list[psutil.Process]:
        return [p for p in psutil.process_iter() if str(self.vllm) in words_of(p)]

    def at_rest(self) -> None:
        """The original alone, answering; no variant, no unit of it, no guard."""
        self.wait_answer()
        (only,) = self.servers()
        assert "--speculative-config" not in words_of(only)
        assert not (self.home / "units" / "llm-ngram.service").exists()
        assert not self.guards()

    def guards(self) -> list[psutil.Process]:
        """The guards; what one has just forked to become another program still has its words and is left out."""
        named = [(p, words_of(p)) for p in psutil.process_iter()]
        found = [p for p, words in named if "labkit.engine.service.guard" in words and str(self.swaps) in words]
        return [p for p in found if parent_of(p) not in {other.pid for other in found}]

    def wait_guards(self) -> None:
        """Until nobody has the lock: neither lab nor guard, nor one that is just being started."""
        deadline = time.monotonic() + 60
        while (held := state.lock(self.swaps)) is None:
            assert time.monotonic() < deadline, f"the guard is still there; phase {self.phase}"
            time.sleep(0.1)
        os.close(held)

    def lab(self, *words: str, apply: bool = True) -> subprocess.Popen:
        """`labkit swap` as a process."""
        base = [sys.executable, "-m", "labkit.cli", "swap", "llm", "--systemctl", self.systemctl]
        base += ["--unit-dir", str(self.home / "units"), *(["--apply"] if apply else []), *words]
        # Where the tests run under nohup or behind a shell's &, these are ignored here, and would be by the lab.
        heard = {"preexec_fn": lambda: [signal.signal(n, signal.SIG_DFL) for n in (signal.SIGHUP, signal.SIGINT)]}
        return subprocess.Popen(base, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **heard)

    def experiment(self) -> list[str]:
        """What a lab's command line ends with: a command that goes on for minutes."""
        return ["--", sys.executable, "-c", "import time; time.sleep(300)", str(self.home / "experiment")]

    def experiments(self) -> list[psutil.Process]:
        """The commands that run, the lab that started them apart."""
        found = [p for p in psutil.process_iter() if words_of(p)[-1:] == [str(self.home / "experiment")]]
        return [p for p in found if "labkit.cli" not in words_of(p)]

    def wait_phase(self, *phases: str) -> None:
        deadline = time.monotonic() + 60
        while self.phase not in phases:
            assert time.monotonic() < deadline, f"{self.phase} instead of {phases}"
            time.sleep(0.02)


def parent_of(process: psutil.Process) -> int:
    """Its parent's id; 0 where the process is gone."""
    try:
        return process.ppid()
    except psutil.NoSuchProcess:
        return 0


def alive(process: psutil.Process) -> bool:
    """Whether it runs; a zombie, which its parent has not asked about yet, does not (psutil says that it does)."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def words_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@pytest.fixture
def make(tmp_path, monkeypatch):
    monkeypatch.setenv("STANDIN", str(tmp_path))
    monkeypatch.setenv("LABKIT_OUTPUTS", str(tmp_path / "outputs"))
    machines = []

    def start(**options) -> Machine:
        machines.append(Machine(tmp_path, **options))
        machines[0].wait_answer()
        return machines[0]

    yield start
    for machine in machines:
        for process in [*machine.guards(), *machine.servers()]:
            process.kill()


@pytest.fixture
def machine(make):
    return make()


def test_a_plan_changes_nothing(machine):
    before = machine.servers()[0].pid
    plan = machine.plan(num_speculative_tokens=3)
    assert '+    --speculative-config \'{"method": "ngram", "num_speculative_tokens": 3' in plan.diff
    assert "-Restart=always" in plan.diff
    assert plan.unit_path.read_text() == plan.after
    assert f"{machine.systemctl} stop llm.service" in str(plan).splitlines()
    with pytest.raises(engine.NotApplied), engine.swap(plan):
        pass
    assert not (machine.home / "units" / "llm-ngram.service").exists()
    assert [p.pid for p in machine.servers()] == [before]
    verbs = {line.split()[0] for line in (machine.home / "calls").read_text().splitlines()[1:]}
    assert verbs <= {"show", "cat"}


def test_the_variant_serves_in_the_block_and_the_original_after_it(machine):
    before = machine.servers()[0].pid
    with engine.swap(machine.plan(), apply=True) as server:
        assert (machine.model(), server.model) == ("speculating", "speculating")
        assert server.root_url == f"http://127.0.0.1:{machine.port}"
        (only,) = machine.servers()
        assert only.pid != before
        assert engine.status("llm")["under_way"]
    machine.at_rest()
    now = engine.status("llm")
    assert (now["phase"], now["original"], now["answers"], now["under_way"]) == ("restored", "active", True, False)
    assert engine.restore("llm")["phase"] == "restored", "restoring twice is no error"
    machine.at_rest()


def test_units_that_stop_with_the_original_are_started_again(machine, monkeypatch):
    other = (
        (machine.home / "units" / "llm.service").read_text().replace(str(machine.port), str(launch.free_port()))
    )
    (machine.home / "units" / "proxy.service").write_text(other)
    machine.call("start", "proxy.service")
    monkeypatch.setenv("STANDIN_REQUIRED_BY", "proxy.service idle.service")
    with engine.swap(machine.plan(), apply=True):
        machine.call("stop", "proxy.service")  # as systemd would have
    assert "start proxy.service" in (machine.home / "calls").read_text().splitlines()


def test_an_error_in_the_experiment(machine):
    with pytest.raises(ZeroDivisionError), engine.swap(machine.plan(), apply=True):
        _ = 1 / 0
    machine.at_rest()


def test_a_variant_that_does_not_start(make):
    machine = make(more="VARIANT_FAILS=1")
    plan = machine.plan()
    with pytest.raises(engine.VariantFailed, match="fit: 4711") as failure, engine.swap(plan, apply=True):
        raise AssertionError("the block must not run")
    assert "ended while starting (failed)" in str(failure.value)
    machine.at_rest()
    assert "4711" in engine.status("llm")["error"]
    assert plan.manager.state("llm-ngram.service") == "not-found", "the failure is forgotten, too"


def test_kill_9_of_the_lab_after_the_variant_failed(make):
    """The guard itself puts back after an error, too; the lab only waits for it."""
    machine = make(more="VARIANT_FAILS=1")
    lab = machine.lab("--", "true")
    machine.wait_phase("restoring")
    lab.kill()
    lab.communicate()
    machine.wait_guards()
    machine.at_rest()


def test_a_variant_that_takes_too_long(make):
    machine = make(more="VARIANT_LOAD_S=600")
    plan = dataclasses.replace(machine.plan(), load_limit_s=3.0)
    with pytest.raises(engine.VariantFailed, match="within 3 s"), engine.swap(plan, apply=True):
        raise AssertionError("the block must not run")
    machine.at_rest()


def test_a_process_that_outlives_its_service_is_named_and_left_alone(make, tmp_path):
    """Under KillMode=process systemd ends the main process alone."""
    machine = make(more=f"WORKER={tmp_path}/worker\nKillMode=process")
    with pytest.raises(engine.ProcessesStay) as failure, engine.swap(machine.plan(), apply=True):
        raise AssertionError("the block must not run")
    first, second = sorted(
        (p for p in psutil.process_iter() if f"{tmp_path}/worker" in words_of(p)), key=psutil.Process.create_time
    )
    assert f"pid {first.pid} " in str(failure.value)
    assert f"pid {second.pid} " not in str(failure.value)
    assert "start llm-ngram.service" not in (machine.home / "calls").read_text()
    machine.at_rest()
    for process in (first, second):
        process.kill()


def test_a_process_forked_in_the_block_does_not_keep_the_guard(machine):
    """It holds all that the lab holds, the pipe to the guard among it."""
    with engine.swap(machine.plan(), apply=True):
        worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
        worker.start()
    machine.at_rest()
    assert worker.is_alive()
    worker.kill()
    worker.join()


FORKING = """
import multiprocessing, sys, time
from labkit import engine
with engine.swap(engine.plan("llm", "ngram", systemctl=sys.argv[1], unit_dir=sys.argv[2]), apply=True):
    worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    worker.start()
    print("worker", worker.pid, flush=True)
    time.sleep(600)
"""


def test_kill_9_of_a_lab_whose_worker_lives_on(machine):
    words = [sys.executable, "-c", FORKING, machine.systemctl, str(machine.home / "units")]
    lab = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    line = next(line for line in lab.stdout if "worker " in line)
    worker = psutil.Process(int(line.rsplit("worker ", 1)[1]))
    lab.kill()
    lab.wait()
    deadline = time.monotonic() + 30
    while machine.phase != "restored":
        assert time.monotonic() < deadline, machine.phase
        time.sleep(0.1)
    assert alive(worker)
    worker.kill()
    machine.wait_guards()
    machine.at_rest()


def test_a_variant_that_is_deaf_while_it_loads(make):
    """It ignores SIGTERM, as vLLM does then, so systemd kills it after its TimeoutStopSec; nothing is left."""
    machine = make(more="VARIANT_DEAF=1 VARIANT_LOAD_S=60", stop_s=1)
    lab = machine.lab("--", "true")
    machine.wait_phase("starting")
    while "0%" not in machine.swaps.joinpath("state.json").read_text():  # its log's last line
        time.sleep(0.05)
    (loading,) = machine.servers()
    lab.terminate()
    said, _ = lab.communicate(timeout=60)
    assert lab.returncode == 143, said
    assert not alive(loading)
    machine.at_rest()


SMI = """#!{python} -I
import os, pathlib, sys
calls = pathlib.Path(os.environ["STANDIN"], "calls").read_text()
stopped = "stop llm.service" in calls
if "memory.used" in sys.argv[1] and "compute-apps" not in sys.argv[1]:
    print("0, 30000")
elif "uuid" in sys.argv[1] and "compute-apps" not in sys.argv[1]:
    print("0, GPU-aa")
else:
    service = pathlib.Path(os.environ["STANDIN"], "first").read_text()
    print(f"GPU-aa, {{service}}, 20000" if not stopped else f"GPU-aa, {{os.getppid()}}, 30000")
"""


def test_memory_that_does_not_come_back(machine, monkeypatch):
    """The original had 20000 MiB, which somebody else has afterwards: no variant starts, the holder is named."""
    (machine.home / "first").write_text(str(machine.servers()[0].pid))
    (machine.home / "bin" / "nvidia-smi").write_text(SMI.format(python=sys.executable))
    (machine.home / "bin" / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{machine.home / 'bin'}:{os.environ['PATH']}")
    with pytest.raises(engine.GpuMemoryHeld) as failure, engine.swap(machine.plan(), apply=True):
        raise AssertionError("the block must not run")
    for part in ("GPU 0 uses 30000 MiB", "10000 MiB were expected", "labkit.engine.service.guard"):
        assert part in str(failure.value)
    assert "start llm-ngram.service" not in (machine.home / "calls").read_text()
    machine.at_rest()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_signals_to_the_lab(machine, number, code):
    """The command that ran ends too, and the lab returns only when the original is back."""
    lab = machine.lab(*machine.experiment())
    machine.wait_phase("ready")
    while not machine.experiments():
        time.sleep(0.05)
    lab.send_signal(number)
    said, _ = lab.communicate(timeout=60)
    assert machine.phase == "restored", said
    machine.at_rest()
    assert lab.returncode == code, said
    assert not machine.experiments()


def test_the_command_gets_the_address_and_its_exit_code_is_ours(machine):
    shown, _ = machine.lab(apply=False).communicate(timeout=60)
    assert "+++ llm-ngram.service" in shown
    assert "nothing was changed" in shown
    code = "import sys, urllib.request as u; print(u.urlopen(sys.argv[1]).read().decode()); sys.exit(7)"
    lab = machine.lab("-o", "num_speculative_tokens=2", "--", sys.executable, "-c", code, "{url}/v1/models")
    said, _ = lab.communicate(timeout=60)
    assert "speculating" in said
    assert '\\"num_speculative_tokens\\": 2' in said
    assert lab.returncode == 7, said
    machine.at_rest()


def test_kill_9_of_the_lab_at_random_moments(make):
    """A moment is drawn from an undisturbed swap's whole time: from before its first step to after its last."""
    machine = make()
    command = ("--", sys.executable, "-c", "import time; time.sleep(0.5)")
    lab = machine.lab(*command)
    machine.wait_phase("begun")
    begun = time.monotonic()
    lab.communicate(timeout=120)
    whole = time.monotonic() - begun
    draw = random.Random(seed := random.randrange(10**6))
    phases, seconds = [], []
    for number in range(KILLS):
        (machine.swaps / "state.json").unlink()
        lab = machine.lab(*command)
        machine.wait_phase("begun")
        time.sleep(moment := draw.uniform(0, whole))
        phases.append(machine.phase)
        lab.kill()
        killed = time.monotonic()
        lab.communicate()
        machine.wait_guards()
        machine.wait_answer()
        seconds.append(time.monotonic() - killed)
        machine.at_rest()
        print(
            f"kill {number}, seed {seed}: {moment:.2f} of {whole:.2f} s, {phases[-1]}: back in {seconds[-1]:.1f} s"
        )
    spread = f"{min(seconds):.1f} to {max(seconds):.1f} s, median {statistics.median(seconds):.1f} s"
    print(f"{KILLS} kills by phase: { ({phase: phases.count(phase) for phase in phases}) }; back in {spread}")


@pytest.mark.parametrize("phase", ["installing", "starting", "ready"])
def test_both_killed_then_restore(machine, phase):
    lab = machine.lab(*machine.experiment())
    machine.wait_phase(phase)
    (guard,) = machine.guards()
    while phase == "ready" and not machine.experiments():
        time.sleep(0.05)
    for process in (guard, psutil.Process(lab.pid)):
        process.kill()
    lab.communicate()
    assert not machine.experiments(), "the command does not outlive the lab"
    said = subprocess.run(
        [sys.executable, "-m", "labkit.cli", "swap", "llm", "--restore"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert said.returncode == 0, said.stderr
    assert "restored" in said.stdout
    machine.at_rest()


def test_the_guard_killed_while_the_variant_serves(machine):
    with engine.swap(machine.plan(), apply=True):
        (guard,) = machine.guards()
        guard.kill()
    machine.at_rest()


def test_restore_ends_a_swap_that_is_under_way(machine):
    lab = machine.lab("--", sys.executable, "-c", "import time; time.sleep(3)")
    machine.wait_phase("ready")
    assert engine.restore("llm")["phase"] == "restored"
    machine.at_rest()
    said, _ = lab.communicate(timeout=60)
    assert "SwapEnded" in said, "its figures must not pass for the variant's"
    assert lab.returncode == 1
    machine.at_rest()


def test_restore_ends_a_swap_whose_block_did_not_begin(machine, monkeypatch):
    """Between the variant's first answer and the block somebody else is quicker."""
    waited = swap_module.wait_for

    def then_restored(state, guard, what, phases):
        waited(state, guard, what, phases)
        if "ready" in phases:
            engine.restore("llm")

    monkeypatch.setattr(swap_module, "wait_for", then_restored)
    with (
        pytest.raises(engine.SwapEnded, match="before the block began"),
        engine.swap(machine.plan(), apply=True),
    ):
        raise AssertionError("the block must not run")
    machine.at_rest()


def test_a_variant_that_ends_during_the_experiment(machine):
    with pytest.raises(engine.VariantFailed, match="by itself"), engine.swap(machine.plan(), apply=True):
        machine.servers()[0].kill()
    machine.at_rest()


def test_somebodys_unit_of_the_same_name_is_left_alone(machine):
    theirs = machine.home / "units" / "llm-ngram.service"
    theirs.write_text("[Service]\nExecStart=/bin/true\n")
    with pytest.raises(engine.SwapRefused, match=r"llm-ngram\.service"), engine.swap(machine.plan(), apply=True):
        raise AssertionError("the block must not run")
    assert theirs.read_text() == "[Service]\nExecStart=/bin/true\n"
    assert machine.model() == "plain"


STRANGER = """#!{python} -I
import http.server, os, sys, time
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
if sys.argv[1] == "llm.service" and os.fork() == 0:
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDWR), 1); os.dup2(1, 2)
    http.server.HTTPServer(("127.0.0.1", {port}), Answer).serve_forever()
elif sys.argv[1] == "llm.service":
    time.sleep(0.3)
"""


def test_a_stranger_on_the_port_is_named_and_left_alone(machine):
    """It takes the port once the original lets go of it, and answers; the original comes back when it goes."""
    hook = machine.home / "on-stop"
    hook.write_text(STRANGER.format(python=sys.executable, port=machine.port))
    hook.chmod(0o755)
    plan = machine.plan()
    with pytest.raises(engine.NotRestored) as failure, engine.swap(plan, apply=True):
        raise AssertionError("the block must not run")
    (stranger,) = [p for p in psutil.process_iter() if str(hook) in words_of(p)]
    assert f"pid {stranger.pid}" in str(failure.value)
    assert "PortHeld" in str(failure.value)
    assert str(hook) in str(failure.value)
    assert stranger.username() in str(failure.value)
    assert stranger.status() != psutil.STATUS_ZOMBIE
    assert engine.status("llm")["phase"] == "not restored"
    hook.unlink()
    stranger.kill()
    psutil.wait_procs([stranger], timeout=10)
    assert engine.restore("llm")["answers"]
    machine.at_rest()


def test_two_swaps_at_once(machine):
    with engine.swap(machine.plan(), apply=True):
        with pytest.raises(engine.SwapBusy, match=str(os.getpid())), engine.swap(machine.plan(), apply=True):
            raise AssertionError("the block must not run")
        assert machine.model() == "speculating", "the refused one disturbed nothing"
    machine.at_rest()


def test_a_service_that_does_not_run_is_not_swapped(machine):
    machine.call("stop", "llm.service")
    with pytest.raises(engine.SwapRefused, match="inactive"), engine.swap(machine.plan(), apply=True):
        raise AssertionError("the block must not run")
    assert not machine.servers()


if SOAK:  # each start takes a minute of both cores

    def test_a_real_vllm(tmp_path, monkeypatch, target):
        """Swapped for its n-gram variant by its own unit, and back; the counters tell that it speculated."""
        monkeypatch.setenv("STANDIN", str(tmp_path))
        monkeypatch.setenv("LABKIT_OUTPUTS", str(tmp_path / "outputs"))
        flags = "--max-model-len 512 --enforce-eager --dtype bfloat16 --served-model-name plain --host 127.0.0.1"
        options = {"tensor_parallel_size": 1}
        variables = " ".join(f"{name}={value}" for name, value in launch.environment(options).items())
        start = f"{sys.executable} -m {launch.MODULE} --model {target.path} {flags}"
        machine = Machine(tmp_path, more=variables, start=start)
        try:
            machine.wait_answer(300)
            plan = engine.plan("llm", "ngram", systemctl=machine.systemctl, unit_dir=tmp_path / "units")
            body = {"model": "plain", "prompt": "one two three one two three one two", "max_tokens": 32}
            with engine.swap(plan, apply=True) as server:
                httpx.post(f"{server.base_url}/completions", json=body, timeout=120).raise_for_status()
                drafts = acceptance.snapshot(server.metrics_url)
            assert drafts.values["drafts"] > 0
            machine.wait_answer()
            assert "spec_decode" not in httpx.get(f"{plan.url}/metrics", trust_env=False).text
            assert engine.status("llm")["phase"] == "restored"
        finally:
            machine.call("stop", "llm.service")
