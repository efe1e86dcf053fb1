"""A light server in place of `vllm serve` that fails when and how the variable FAULT says.

`python standin.py PORT`. FAULT is JSON: `at` ("start", "post" or nothing), `how` ("kill", "memory", "disk",
"hang"), `after` (how many POSTs are answered first), `asked` (a file that gets a line a POST), and for hidden
states `storage`, `places` and `width`.
"""

import http.server
import json
import os
import resource
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

FAULT = json.loads(os.environ["FAULT"])
LOCK = threading.Lock()
TOKENS = 6
posts = 0


def fail() -> None:
    """End in the way that was asked for."""
    if FAULT["how"] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if FAULT["how"] == "hang":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
    if FAULT["how"] == "disk":
        with Path("/dev/full").open("wb", buffering=0) as full:
            full.write(b"0")
    resource.setrlimit(resource.RLIMIT_AS, (512 << 20, 512 << 20))
    try:
        bytearray(8 << 30)
    except MemoryError:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def states(ids: list[int], name: str) -> str:
    """A file of hidden states as the connector writes it, with its lock file; returns its path."""
    import numpy as np
    from safetensors.numpy import save_file

    path = f"{FAULT['storage']}/cmpl-{name}-0.safetensors"
    shape = (len(ids), FAULT["places"], FAULT["width"])
    found = np.random.default_rng(sum(ids)).standard_normal(shape).astype(np.float32)
    save_file({"hidden_states": found, "token_ids": np.array(ids)}, path)
    Path(f"{path}.lock").touch()
    return path


class Answer(http.server.BaseHTTPRequestHandler):
    """Models, health, chat and completions."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Nothing: the log is for the fault."""

    def do_GET(self) -> None:
        """What a client looks for before it asks."""
        known = self.path in ("/health", "/v1/models")
        self.reply({"data": [{"id": "tiny"}]}, 200 if known else 404)

    def do_POST(self) -> None:
        """A stream, an answer, or states; the fault comes in the middle of it."""
        global posts
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with LOCK:
            posts += 1
            failing = FAULT.get("at") == "post" and posts > FAULT["after"]
            if FAULT.get("asked"):
                with Path(FAULT["asked"]).open("a") as file:
                    file.write(f"{body.get('request_id', '').rpartition('-')[2] or posts}\n")
        if body.get("stream"):
            self.stream(failing)
            return
        time.sleep(0.02)
        if failing:
            fail()
        if "request_id" in body:
            path = states(body["prompt"], body["request_id"])
            self.reply({"kv_transfer_params": {"hidden_states_path": path}})
            return
        said = {"role": "assistant", "content": "a b c"}
        choice = {"message": said, "finish_reason": "stop", "token_ids": [7, 8, 9, 2]}
        self.reply({"prompt_token_ids": [1, 5, 6], "choices": [choice], "model": "tiny"})

    def stream(self, failing: bool) -> None:
        """TOKENS chunks; a failing one ends after two."""
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for number in range(TOKENS):
            if failing and number == 2:
                fail()
            end = "length" if number == TOKENS - 1 else None
            self.chunk(
                {"choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": end, "token_ids": [number]}]}
            )
            time.sleep(0.01)
        self.chunk("[DONE]")
        self.wfile.write(b"0\r\n\r\n")

    def chunk(self, event: object) -> None:
        """One event as a chunk."""
        data = b"data: " + (event if isinstance(event, str) else json.dumps(event)).encode() + b"\n\n"
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def reply(self, value: object, status: int = 200) -> None:
        """A JSON answer."""
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


if __name__ == "__main__":
    print("INFO loading", flush=True)
    if FAULT.get("at") == "start":
        fail()
    http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Answer).serve_forever()
