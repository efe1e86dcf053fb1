"""labkit.trace beside HolisticTraceAnalysis on the same traces.

    python -m benchmarks.trace_vs_hta PEER_PYTHON [--quick]

Both read all ranks and say where the time went: labkit load, summary, breakdown and collectives (wait told from
transfer); HTA parse, temporal breakdown, overlap and kernel breakdown. The traces are two H200 ranks of a decode
run (tests/data), repeated in time; each pass is a fresh process, the two in turn, imports outside of the clock.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks import measuring, traces
from benchmarks.measuring import Outcome, spread

HERE = Path(__file__).parent
SOURCES = HERE.parent / "tests" / "data" / "trace_tp2_h200_llama"
# MB of JSON a rank, ranks, repeats
CONFIGURATIONS = ((50, 2, 5), (50, 8, 3), (200, 2, 3), (200, 8, 1))
GOAL_SPEED, GOAL_MEMORY = 5.0, 0.5


def passes(folder: Path, peer: str, repeats: int) -> tuple[list[Outcome], list[Outcome]]:
    """Outcomes of labkit and of HTA, in turn."""
    environment = {key: value for key, value in os.environ.items() if key != "LD_PRELOAD"}
    ours, theirs = [], []
    for _ in range(repeats):
        ours.append(measuring.run([sys.executable, str(HERE / "run_labkit_trace.py"), str(folder)], environment))
        theirs.append(measuring.run([peer, str(HERE / "run_hta.py"), str(folder)], environment))
    return ours, theirs


def row(megabytes: int, ranks: int, ours: list[Outcome], theirs: list[Outcome]) -> str:
    """A line of the table: times, ratio of each pair, memory, what a worker needs for each byte of a rank."""
    ratios = [b.seconds / a.seconds for a, b in zip(ours, theirs, strict=True)]
    memory = [statistics.median(o.peak_mb for o in side) for side in (ours, theirs)]
    times = [spread([o.seconds for o in side]) for side in (ours, theirs)]
    kept = statistics.median(ratios) >= GOAL_SPEED and (ranks < 8 or memory[0] <= GOAL_MEMORY * memory[1])
    return (
        f"| {ranks} x {megabytes} MB | {times[0]} s | {times[1]} s | **{spread(ratios)}** | {memory[0]:,.0f} MB | "
        f"{memory[1]:,.0f} MB | {memory[0] / memory[1]:.2f} | {'yes' if kept else 'NO'} |"
    )


def main(peer: str, *options: str) -> None:
    """Print the table."""
    chosen = CONFIGURATIONS[:1] if "--quick" in options else CONFIGURATIONS
    print("\nTraces, labkit beside HolisticTraceAnalysis 0.5.0 (median, range; peak PSS of all processes)")
    print()
    print("| traces (JSON, gzipped) | labkit | HTA | HTA / labkit | memory | HTA's | ratio | goal kept |")
    print("|---|---|---|---|---|---|---|---|")
    sources = sorted(SOURCES.glob("*.gz"))
    for megabytes, ranks, repeats in chosen:
        with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
            folder = Path(scratch)
            traces.enlarge(sources, folder, ranks=ranks, megabytes=megabytes)
            ours, theirs = passes(folder, peer, repeats)
        print(row(megabytes, ranks, ours, theirs), flush=True)
    told = [side[-1].report["communication"] for side in (ours, theirs)]
    print(
        f"\nlabkit: AllReduce has {told[0]:.1%} of the step (mean over ranks). HTA: communication has "
        f"{told[1]:.1%} of kernel time; it does not know vLLM's own AllReduce (cross_device_reduce)."
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
