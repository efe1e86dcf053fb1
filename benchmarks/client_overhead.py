"""What the benchmark client adds to what it measures: python -m benchmarks.client_overhead [--quick]

A server in a process of its own writes a token every 20 ms to each stream and records when. labkit's client and
the request function of `vllm bench serve` read it in turn; what they report is set against those records.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np

from benchmarks.measuring import spread
from labkit import bench

PERIOD_S, TOKENS, QUICK_TOKENS = 0.020, 200, 50
STREAMS, REPEATS = (1, 8, 64), 3
GOAL = 0.02  # of the truth, at the most streams

Gaps = dict[str, list[float]]  # of each stream, by its prompt, ms


@dataclass(frozen=True)
class Outcome:
    """One client at one number of streams in one pass."""

    client: str
    streams: int
    ratio: float  # median gap as measured / as written
    p99_ratio: float
    off_ms: float  # 99th percentile of |measured - written| of a gap


def compared(client: str, measured: Gaps, written: Gaps) -> Outcome:
    """Measured gaps beside written ones of the same streams; raises RuntimeError where their numbers differ."""
    wrong = [name for name in written if len(measured.get(name, ())) != len(written[name])]
    if wrong or len(measured) != len(written):
        raise RuntimeError(f"{client}: gaps of {wrong or sorted(measured)} were not measured one for one")
    seen = np.concatenate([measured[name] for name in written])
    true = np.concatenate([written[name] for name in written])
    return Outcome(
        client,
        len(written),
        float(np.median(seen) / np.median(true)),
        float(np.quantile(seen, 0.99) / np.quantile(true, 0.99)),
        float(np.quantile(np.abs(seen - true), 0.99)),
    )


@contextlib.contextmanager
def steady_server(tokens: int) -> Iterator[str]:
    """The address of a server that runs until the context ends."""
    command = [sys.executable, str(Path(__file__).with_name("steady_server.py")), str(PERIOD_S), str(tokens)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


def names(streams: int) -> list[str]:
    """A prompt for each stream."""
    return [f"stream {number}" for number in range(streams)]


def written(url: str, streams: int) -> Gaps:
    """The gaps of the latest stream of each prompt, as the server wrote them."""
    times = httpx.get(f"{url}/emissions", timeout=30, trust_env=False).json()
    return {name: (np.diff(times[name]) * 1e3).tolist() for name in names(streams)}


def by_labkit(url: str, streams: int, tokens: int) -> Gaps:
    """Gaps as the lab's client reports them."""
    options = {"repeats": 1, "warmup": 0, "concurrency": streams, "shuffle": False}
    rows = bench.run(url, names(streams), max_tokens=tokens, **options)
    return {f"stream {number}": list(gaps) for number, gaps in enumerate(rows["gaps_ms"])}


def by_vllm(url: str, streams: int, tokens: int) -> Gaps:
    """Gaps as the request function of `vllm bench serve` reports them; its first one begins at the role chunk."""
    import aiohttp
    from vllm.benchmarks.lib.endpoint_request_func import RequestFuncInput, async_request_openai_chat_completions

    async def all_of_them() -> Gaps:
        connector = aiohttp.TCPConnector(limit=streams, limit_per_host=streams, keepalive_timeout=60)
        async with aiohttp.ClientSession(connector=connector) as session:
            asked = [
                RequestFuncInput(
                    name,
                    f"{url}/v1/chat/completions",
                    9,
                    tokens,
                    "steady",
                    chat_messages=[{"role": "user", "content": name}],
                )
                for name in names(streams)
            ]
            answers = await asyncio.gather(*(async_request_openai_chat_completions(one, session) for one in asked))
        return {one.prompt: [gap * 1e3 for gap in got.itl[1:]] for one, got in zip(asked, answers, strict=True)}

    return asyncio.run(all_of_them())


CLIENTS = {"labkit": by_labkit, "vllm bench serve": by_vllm}


def measure(streams: Sequence[int], tokens: int, repeats: int) -> list[Outcome]:
    """Both clients in turn, at each number of streams, as often as asked."""
    found = []
    with steady_server(tokens) as url:
        for client in CLIENTS.values():
            client(url, 1, tokens)  # imports, first connection
        for count in [count for _ in range(repeats) for count in streams]:
            for name, client in CLIENTS.items():
                found.append(compared(name, client(url, count, tokens), written(url, count)))
    return found


def main() -> None:
    """Print the table."""
    quick = "--quick" in sys.argv[1:]
    tokens, repeats = (QUICK_TOKENS, 1) if quick else (TOKENS, REPEATS)
    found = measure(STREAMS, tokens, repeats)
    print(f"\nA token every {PERIOD_S * 1e3:g} ms a stream, {tokens} tokens, {repeats} times; measured / written")
    print("\n| streams | client | median ITL | 99th percentile | a gap off by, p99, ms |")
    print("|---|---|---|---|---|")
    for count in STREAMS:
        for name in CLIENTS:
            of = [one for one in found if (one.client, one.streams) == (name, count)]
            ratios = [one.ratio for one in of]
            cells = [finely(ratios), finely([one.p99_ratio for one in of]), spread([one.off_ms for one in of])]
            if name == "labkit" and count == max(STREAMS):
                kept = all(abs(ratio - 1) <= GOAL for ratio in ratios)
                cells[0] += " (goal kept in every pass)" if kept else " (GOAL MISSED)"
            print(f"| {count} | {name} | {' | '.join(cells)} |")


def finely(values: Sequence[float]) -> str:
    """Median, and the range where there are several, to four places."""
    reach = f" [{min(values):.4f}, {max(values):.4f}]" if len(values) > 1 else ""
    return f"{statistics.median(values):.4f}{reach}"


if __name__ == "__main__":
    main()
