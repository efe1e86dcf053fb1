"""One real vLLM server for all engine tests: it takes about a minute to start on two cores."""

from collections.abc import Iterator

import pytest

from labkit import engine, targets
from labkit.engine import launch


@pytest.fixture(scope="session", autouse=True)
def small_caches() -> Iterator[None]:
    """Several of these servers stand side by side."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "KV_CACHE_GIB", 1)
        yield


@pytest.fixture(scope="session")
def target() -> targets.Target:
    return targets.resolve("smollm2")


@pytest.fixture(scope="session")
def log_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("servers")


@pytest.fixture(scope="session")
def server(target, log_dir) -> Iterator[engine.Server]:
    """SmolLM2 without speculation."""
    with engine.serve(target, "baseline", log_dir=log_dir, max_model_len=1024) as running:
        yield running
