"""JupyterLab as `make lab` opens it, Debian's Chromium before it, and a vLLM that notebooks attach to."""

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from playwright.sync_api import Browser, sync_playwright

from labkit import engine
from labkit.engine.launch import free_port
from tests.browser.lab import FOLDER, ROOT, Lab

OURS = ("LABKIT_HEADLESS", "LABKIT_OUTPUTS", "MPLBACKEND", "MAKEFLAGS")  # what tests set, and a person has not
CHROMIUM = Path("/usr/bin/chromium")
# As few connections to the outside as Chromium lets itself be talked into; it runs as root here.
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
FLAGS += ["--disable-component-update", "--disable-sync"]


@pytest.fixture(scope="session")
def jupyter(tmp_path_factory) -> Iterator[tuple[str, psutil.Process]]:
    """A JupyterLab that `make lab` started: its address with a token, its process; nothing of it is left later."""
    home, log = tmp_path_factory.mktemp("jupyter"), FOLDER / "jupyterlab.log"
    FOLDER.mkdir(parents=True, exist_ok=True)
    own = {"JUPYTER_CONFIG_DIR": "config", "JUPYTER_DATA_DIR": "data", "IPYTHONDIR": "ipython"}
    own |= {"JUPYTER_RUNTIME_DIR": "runtime", "LABKIT_OUTPUTS": "runs"}
    environment = {name: value for name, value in os.environ.items() if name not in OURS}
    environment |= {name: str(home / folder) for name, folder in own.items()} | {"PYTHONPATH": str(ROOT)}
    news = home / "config/lab/user-settings/@jupyterlab/apputils-extension/notification.jupyterlab-settings"
    news.parent.mkdir(parents=True)
    news.write_text('{"fetchNews": "false", "checkForUpdates": false}')  # nothing here asks the outside
    # -o: .venv is what these tests run in. The application in the browser tells what its notebooks hold.
    options = f"LAB=--no-browser --port {free_port()} --LabApp.expose_app_in_browser=True"
    command = ["make", "-o", ".venv/bin/.ready", "lab", options]
    with log.open("wb") as out:
        started = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=out, stderr=out, start_new_session=True
        )
    process = psutil.Process(started.pid)
    try:
        yield address_in(log, started), process
    finally:
        family = process.children(recursive=True)
        os.killpg(process.pid, signal.SIGTERM)
        _, left = psutil.wait_procs(family, timeout=60)
        for stray in left:
            stray.kill()
    assert not left, left
    assert "without encryption" not in log.read_text(), "kernels are reached over encrypted sockets"


def address_in(log: Path, process: subprocess.Popen) -> str:
    """The first address with a token that JupyterLab prints."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        found = re.search(r"http://127\.0\.0\.1:\d+/lab\?token=\w+", log.read_text())
        if found:
            return found[0]
        time.sleep(0.2)
    raise AssertionError(log.read_text()[-3000:])


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    assert CHROMIUM.exists(), "install Debian's package chromium, or run `make test` as root"
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture(scope="session")
def engine_started(tmp_path_factory) -> Iterator[Future]:
    """A vLLM that starts beside the first tests; `.result()` waits for it."""
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(1) as pool:
        serving = engine.serve("smollm2", log_dir=tmp_path_factory.mktemp("engine"), max_model_len=1024)
        yield pool.submit(stack.enter_context, serving)


@pytest.fixture
def lab(jupyter: tuple[str, psutil.Process], browser: Browser) -> Iterator[Lab]:
    """A window with JupyterLab; its kernel ends with the test."""
    page = browser.new_page(viewport={"width": 1500, "height": 1000})
    found = Lab(page, *jupyter)
    yield found
    found.close()
