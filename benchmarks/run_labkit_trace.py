"""One timed pass of labkit over a folder of traces; prints JSON. Imports come before the clock starts."""

import json
import sys
import time

import pandas  # noqa: F401  (a notebook has it, as the peer's has)

from labkit import trace
from labkit.trace import model, summary  # noqa: F401

if __name__ == "__main__":
    begun = time.perf_counter()
    traces = trace.load(sys.argv[1])
    parsed = time.perf_counter()
    ranks = traces.summary()
    parts, calls = traces.breakdown(), traces.collectives()
    ended = time.perf_counter()
    told = {"ranks": len(ranks), "collectives": len(calls), "steps": int(ranks["steps"].sum())}
    told |= {"communication": float(ranks["allreduce_share"].mean()), "rows": len(parts)}
    print(json.dumps({"seconds": ended - begun, "parse_s": parsed - begun} | told))
