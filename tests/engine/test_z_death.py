"""Last, because it kills servers: one that dies is named, and nothing of it stays."""

import psutil
import pytest

from labkit import bench, engine


def named_as_killed(server: engine.Server) -> None:
    with pytest.raises(engine.EngineDied, match="SIGKILL") as died:
        server.check()
    assert "next run" in died.value.remedy


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
    named_as_killed(server)


def test_killed_supervisor(target, log_dir):
    """Who would clean up is gone itself: its sentinel ends API server and engine core. `log_dir` may be text."""
    with engine.serve(target, "baseline", log_dir=str(log_dir), max_model_len=512) as server:
        supervisor = psutil.Process(server.process.pid)
        everything = supervisor.children(recursive=True)
        names = [" ".join(process.cmdline()) for process in everything]
        assert any("api_server" in name for name in names)
        assert any("EngineCore" in name for name in names)
        supervisor.kill()
        server.process.wait()
        _, left = psutil.wait_procs(everything, timeout=40)
        assert not left
        named_as_killed(server)
