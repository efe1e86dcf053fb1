"""Last, because it kills the server of all: one that dies is named, and nothing of it stays."""

import psutil
import pytest

from labkit import bench, engine


def test_killed_api_server(server):
    supervisor = psutil.Process(server.process.pid)
    everything = supervisor.children(recursive=True)
    (api,) = [process for process in supervisor.children() if "api_server" in " ".join(process.cmdline())]
    api.kill()
    with pytest.raises(bench.ServerGone, match="stopped answering") as failure:
        bench.run(server, ["Count: one two three"], max_tokens=8, repeats=2)
    assert len(failure.value.rows) == 2
    _, left = psutil.wait_procs(everything, timeout=40)
    assert not left
    with pytest.raises(engine.EngineDied, match="SIGKILL") as died:
        server.check()
    assert "next run" in died.value.remedy
