"""One timed pass of HolisticTraceAnalysis over a folder of traces; prints JSON. Runs in its own environment."""

import json
import sys
import time

from hta.trace_analysis import TraceAnalysis

if __name__ == "__main__":
    begun = time.perf_counter()
    analysis = TraceAnalysis(trace_dir=sys.argv[1])
    parsed = time.perf_counter()
    analysis.get_temporal_breakdown(visualize=False)
    analysis.get_comm_comp_overlap(visualize=False)
    kinds, _ = analysis.get_gpu_kernel_breakdown(visualize=False)
    ended = time.perf_counter()
    share = kinds.set_index("kernel_type")["percentage"].get("COMMUNICATION", 0.0)
    print(json.dumps({"seconds": ended - begun, "parse_s": parsed - begun, "communication": float(share) / 100}))
