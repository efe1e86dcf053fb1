"""What a benchmark sends: the body of a request, and the order, number and concurrency of all of them."""

from __future__ import annotations

import random
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from labkit.bench.journal import Key
from labkit.bench.prompts import Messages, Prompt


@dataclass(frozen=True)
class Plan:
    """What is sent, and how: the same for every request of a run."""

    base_url: str
    metrics_url: str
    model: str
    max_tokens: int
    temperature: float
    seed: int
    concurrency: int
    timeout_s: float
    unique_prompts: bool = False
    extra_body: Mapping[str, Any] = field(default_factory=dict)

    def body(self, prompt: Prompt, repeat: int, *, extended: bool) -> tuple[str, dict[str, Any]]:
        """The path and JSON body of a request; chat for messages, completions for text or token ids.

        `extended` adds what vLLM offers beyond OpenAI's fields: the token ids, and a salt that keeps every
        request from finding another one's prompt in the server's prefix cache.
        """
        chat = isinstance(prompt.content, list) and isinstance(prompt.content[0], dict)
        content = marked(prompt.content) if self.unique_prompts else prompt.content
        body = {
            "model": self.model,
            "messages" if chat else "prompt": content,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": self.seed + repeat,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if extended:
            body |= {"return_token_ids": True, "cache_salt": uuid.uuid4().hex}
        return "chat/completions" if chat else "completions", body | dict(self.extra_body)


def marked(content: Messages | str | list[int]) -> Messages | str | list[int]:
    """A prompt that begins as no other, for caches that know no salt; token ids stay as they are."""
    mark = f"[request {uuid.uuid4().hex[:8]}]\n"
    if isinstance(content, str):
        return mark + content
    first = content[0]
    if not isinstance(first, dict) or not isinstance(first.get("content"), str):
        return content
    return [first | {"content": mark + first["content"]}, *content[1:]]


@dataclass(frozen=True)
class Workload:
    """Which requests are sent, in which order, and with which pauses."""

    prompts: list[Prompt]
    repeats: int
    warmup: int = 1
    levels: tuple[int, ...] = (1,)  # requests in flight, one level after the other
    cooldown_s: float = 0.0
    shuffle: bool = True
    done: frozenset[Key] = frozenset()  # measured before an interruption

    def jobs(self, level: int, seed: int) -> list[tuple[Prompt, int]]:
        """(prompt, repeat) in the order of sending: in each repeat another one, the same for each variant.

        A machine that drifts (heat, other load) then slows down all categories alike.
        """
        found = []
        for repeat in range(self.repeats):
            order = list(self.prompts)
            if self.shuffle:
                random.Random(f"{seed} {repeat}").shuffle(order)
            found += [(p, repeat) for p in order if (level, repeat, p.id) not in self.done]
        return found
