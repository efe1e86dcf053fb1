"""A light server in place of `vllm serve`: loads for a while, then answers /health and /v1/models."""

import http.server
import json
import os
import signal
import subprocess
import sys
import time

flags = sys.argv[1:]
variant = "--speculative-config" in flags
load_s = float((variant and os.environ.get("VARIANT_LOAD_S")) or os.environ["LOAD_S"])
if os.environ.get("WORKER"):
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", os.environ["WORKER"]])
if variant and os.environ.get("VARIANT_DEAF"):  # as vLLM is while it loads
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
for percent in range(0, 100, 20):
    print(f"INFO loading weights {percent}%", flush=True)
    time.sleep(load_s / 5)
if variant and os.environ.get("VARIANT_FAILS"):
    sys.exit("ValueError: the draft does not fit: 4711")


class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = {"data": [{"id": "speculating" if variant else "plain"}], "flags": flags, "pid": os.getpid()}
        self.send_response(200 if self.path in ("/health", "/v1/models") else 404)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_):
        pass


http.server.ThreadingHTTPServer.allow_reuse_address = True
server = http.server.ThreadingHTTPServer(("127.0.0.1", int(flags[flags.index("--port") + 1])), Answer)
print("INFO ready", flush=True)
server.serve_forever()
