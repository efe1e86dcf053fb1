"""The counters of a server's /metrics page: snapshots and their differences."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families

from labkit.engine.urls import root_url
from labkit.errors import LabError


class CountersReset(LabError):
    """The server restarted between two snapshots, so their difference means nothing."""


class ForeignTraffic(LabError):
    """The server also worked for somebody else while it was measured."""


class NoCounters(LabError):
    """The source has no counts of speculation."""


class Unreadable(LabError):
    """The metrics page cannot be fetched or is no Prometheus text."""


# Our name: the names that engines give the counter (without _total, which some leave out).
NAMES = {
    "drafts": ("vllm:spec_decode_num_drafts",),
    "drafted": ("vllm:spec_decode_num_draft_tokens",),
    "accepted": ("vllm:spec_decode_num_accepted_tokens",),
    "accepted_at": ("vllm:spec_decode_num_accepted_tokens_per_pos",),
    "generated": ("vllm:generation_tokens", "sglang:generation_tokens"),
    "requests": ("vllm:request_success", "sglang:num_requests"),
}
OURS = {theirs: ours for ours, names in NAMES.items() for theirs in names}
SPECULATION = ("drafts", "drafted", "accepted", "accepted_at")


@dataclass(frozen=True)
class Counters:
    """Values summed over engines (and API servers), and when each series began.

    values["accepted_at:i"] counts draft position i. `created` maps a series to its start as the server says.
    """

    values: dict[str, float]
    created: dict[str, float]

    @property
    def speculates(self) -> bool:
        """Whether the server counts drafts at all."""
        return "drafts" in self.values

    @property
    def drafts(self) -> int:
        """Verified drafts."""
        return int(self.values.get("drafts", 0))

    @property
    def drafted(self) -> int:
        """Drafted tokens."""
        return int(self.values.get("drafted", 0))

    @property
    def accepted_at(self) -> tuple[int, ...]:
        """Accepted tokens by draft position."""
        positions = sum(name.startswith("accepted_at:") for name in self.values)
        return tuple(int(self.values.get(f"accepted_at:{i}", 0)) for i in range(positions))

    @property
    def generated(self) -> int:
        """Generated tokens of all requests."""
        return int(self.values.get("generated", 0))

    @property
    def requests(self) -> int:
        """Finished requests."""
        return int(self.values.get("requests", 0))

    def until(self, later: Counters) -> Counters:
        """What was counted between this snapshot and a later one of the same server.

        Raises NoCounters when the server does not speculate, CountersReset when it restarted in between.
        """
        if not later.speculates:
            raise NoCounters(
                "the server's /metrics has no vllm:spec_decode_* counters",
                "start it with a speculative configuration; SGLang publishes only windowed gauges, which "
                "cannot be differenced",
            )
        moved = [name for name in self.created if later.created.get(name) != self.created[name]]
        delta = {name: value - self.values.get(name, 0.0) for name, value in later.values.items()}
        fallen = [name for name, value in delta.items() if value < 0]
        gone = [name for name in self.values if name not in later.values]
        if moved or fallen or gone:
            which = ", ".join((moved + fallen + gone)[:4])
            raise CountersReset(
                f"counters went back or began anew between the snapshots: {which}",
                "the server restarted; measure again without a restart",
            )
        return Counters(delta, later.created)


def snapshot(source: object) -> Counters:
    """Counters from Prometheus text, a metrics or server URL, or an engine.Server.

    Raises Unreadable when the page cannot be fetched or parsed.
    """
    source = getattr(source, "metrics_url", source)
    text = str(source)
    if text.startswith(("http://", "https://")) and "\n" not in text:
        url = text if text.rstrip("/").endswith("/metrics") else f"{root_url(text)}/metrics"
        text = fetch(url)
    return parse(text)


def fetch(url: str) -> str:
    """The text of a metrics page; raises Unreadable with the cause."""
    try:
        response = httpx.get(url, timeout=10, trust_env=False)
        response.raise_for_status()
    except httpx.HTTPError as error:
        raise Unreadable(
            f"no metrics at {url}: {error}", "is the server up, and does it publish /metrics?"
        ) from error
    return response.text


def parse(text: str) -> Counters:
    """Counters of a Prometheus page (text format), summed over the labels; raises Unreadable."""
    values: dict[str, float] = defaultdict(float)
    created: dict[str, float] = {}
    try:
        families = list(text_string_to_metric_families(text))
    except ValueError as error:
        raise Unreadable(
            f"this is no Prometheus text: {error}", "give the address of the /metrics page"
        ) from error
    for sample in (sample for family in families for sample in family.samples):
        base = sample.name.removesuffix("_created").removesuffix("_total")
        if base not in OURS:
            continue
        if sample.name.endswith("_created"):
            created[f"{base}{sorted(sample.labels.items())}"] = sample.value
            continue
        name = OURS[base]
        values[f"{name}:{sample.labels['position']}" if name == "accepted_at" else name] += sample.value
    return Counters(dict(values), created)
