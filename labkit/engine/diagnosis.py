"""From a server's log to the likely cause of its death and what to do."""

from __future__ import annotations

import re
from pathlib import Path

# Patterns in the order of how sure they make us: (what the log says, likely cause, what to do)
CAUSES: tuple[tuple[str, str, str], ...] = (
    (r"[Aa]ddress already in use", "the port is taken", "leave `port` at 0 or name another one"),
    (r"No space left on device", "the disk is full", "free some space and run again"),
    (
        r"CUDA out of memory|OutOfMemoryError|Cannot allocate memory|std::bad_alloc|not enough memory|"
        r"\bMemoryError|Unable to allocate",
        "out of memory",
        "lower max_model_len or max_num_seqs, or serve a smaller model",
    ),
    (
        r"larger than the maximum number of tokens that can be stored|No available memory for the cache blocks",
        "the KV cache does not fit",
        "lower max_model_len",
    ),
    (
        r"is greater than the derived max_model_len|max_position_embeddings",
        "max_model_len is more than the model allows",
        "lower max_model_len",
    ),
    (
        r"must be divisible by tensor parallel size|not divisible",
        "the tensor-parallel size does not divide",
        "use a size that `labkit.targets.geometry(...)` lists",
    ),
    (
        r"SafetensorError|HeaderTooLarge|InvalidHeader|incomplete metadata",
        "a weight file is damaged",
        "replace the model or head directory",
    ),
    (
        r"KeyError: '[\w.]*(lm_head|embed_tokens|fc|layers)[\w.]*'|were not initialized from checkpoint|"
        r"size mismatch|shape mismatch|Attempted to load weight",
        "the weights do not fit the configuration",
        "check the directory with labkit.draft.preflight",
    ),
    (
        r"does not recognize this architecture|are not supported for now|not supported.*architectures",
        "this vLLM does not know the architecture",
        "run `labkit doctor`; use a vLLM that supports it",
    ),
    (
        r"ModuleNotFoundError|ImportError",
        "a package is missing or does not load",
        "run `make setup`, then `labkit doctor`",
    ),
    (
        r"unrecognized arguments|ValidationError|error: argument",
        "this vLLM does not take one of the options",
        "run `labkit doctor`: the installed version is probably not a known-good one",
    ),
)


def tail(log_path: Path, lines: int = 15) -> str:
    """The last lines of a log, without progress bars and empty lines."""
    if not log_path.exists():
        return ""
    text = log_path.read_bytes()[-60_000:].decode("utf-8", "replace")
    kept = [line.rsplit("\r", 1)[-1] for line in text.splitlines() if line.strip()]
    return "\n".join(kept[-lines:])


def cause(log_path: Path, exit_code: int | None = None) -> tuple[str, str]:
    """The likely cause of a server's end and what to do, from its log and exit code."""
    text = tail(log_path, 400)
    for pattern, reason, remedy in CAUSES:
        if re.search(pattern, text):
            return reason, remedy
    if exit_code is not None and exit_code in (-9, 128 + 9):
        return (
            "it was killed (SIGKILL: by somebody, or by the system when memory ran out)",
            "run the same command again; if it repeats, lower max_num_seqs",
        )
    return "unknown; the log's last lines say more", f"read {log_path}, run `labkit doctor --probe`"


def last_error(log_path: Path) -> str:
    """The last line that states an exception, else an empty string."""
    pattern = re.compile(r"(?:^|\s)(\w*(?:Error|Exception)\b: .+)$")
    found = [match.group(1) for line in tail(log_path, 400).splitlines() if (match := pattern.search(line))]
    informative = [line for line in found if "Engine core initialization failed" not in line]
    return (informative or found or [""])[-1].strip()
