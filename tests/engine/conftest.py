"""One real vLLM server for all engine tests: it takes about a minute to start on two cores."""

from collections.abc import Iterator

import pytest

from labkit import engine, targets


@pytest.fixture(scope="session")
def target() -> targets.Target:
    return targets.resolve("smollm2")


@pytest.fixture(scope="session")
def log_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("servers")


@pytest.fixture(scope="session")
def server(target, log_dir) -> Iterator[engine.Server]:
    """SmolLM2 without speculation; with a small cache, since other servers run beside it."""
    options = {"max_model_len": 1024, "environment": {"VLLM_CPU_KVCACHE_SPACE": 1}}
    with engine.serve(target, "baseline", log_dir=log_dir, **options) as running:
        yield running
