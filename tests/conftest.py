"""What all tests share."""

import gc
import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("MPLBACKEND", "agg")
BEFORE = dict(os.environ)


@pytest.fixture(scope="module", autouse=True)
def environment_of_its_own() -> Iterator[None]:
    """What a module's tests leave in the environment (vLLM's configurations do) is not the next one's."""
    yield
    for name in os.environ.keys() - BEFORE.keys():
        if not name.startswith("PYTEST_"):  # pytest's own
            del os.environ[name]
    os.environ.update(BEFORE)


def pytest_collection_finish() -> None:
    """What all tests import is set aside: each benchmark begins with a collection, which took a second here."""
    gc.collect()
    gc.freeze()
