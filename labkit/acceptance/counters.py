"""The counters of a server's /metrics page: snapshots and their differences."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import httpx
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from labkit.engine.urls import get, root_url
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
    "drafts": ("vllm:spec_decode_num_drafts", "sglang:spec_verify_calls"),
    "drafted": ("vllm:spec_decode_num_draft_tokens",),
    "accepted": ("vllm:spec_decode_num_accepted_tokens",),
    "accepted_at": ("vllm:spec_decode_num_accepted_tokens_per_pos",),
    "generated": ("vllm:generation_tokens", "sglang:generation_tokens"),
    "requests": ("vllm:request_success", "sglang:num_requests"),
}
OURS = {theirs: ours for ours, names in NAMES.items() for theirs in names}
# Means of the last batches: SGLang shows them, nobody can take a difference of them (NeMo-Automodel#2912).
WINDOWED = ("sglang:spec_accept_length", "sglang:spec_accept_rate")
MOST = 1e15  # nobody counts further
BEGAN = "process_start_time_seconds"
Series = tuple[str, tuple[tuple[str, str], ...]]  # name without suffix, labels


@dataclass(frozen=True)
class Counters:
    """Values summed over engines (and API servers), and when each series began.

    values["accepted_at:i"] counts draft position i. `created` maps a series to its start as the server says.
    `windowed` names gauges of acceptance that are not zero. `series` holds the values before they are summed: one
    engine of several that begins anew is seen there alone.
    """

    values: dict[str, float]
    created: dict[str, float]
    windowed: tuple[str, ...] = ()
    series: dict[str, float] = field(default_factory=dict)

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
    def counts_accepted(self) -> bool:
        """Whether it counts accepted tokens: vLLM does, SGLang counts only verified drafts."""
        return any(name.startswith("accepted") for name in self.values)

    @property
    def accepted(self) -> int | None:
        """Accepted draft tokens; None where only those by position are counted."""
        return int(self.values["accepted"]) if "accepted" in self.values else None

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
            shown = f", only the gauges {', '.join(later.windowed)}" if later.windowed else ""
            raise NoCounters(
                f"the server's /metrics has no vllm:spec_decode_* or sglang:spec_verify_calls counters{shown}",
                "start it with a speculative configuration; gauges are means of the last batches, whoever sent "
                "them, and cannot be differenced: an SGLang that counts spec_verify_calls_total is needed",
            )
        moved = [name for name in self.created if later.created.get(name) != self.created[name]]
        delta = {name: value - self.values.get(name, 0.0) for name, value in later.values.items()}
        fallen = [name for name, value in self.series.items() if later.series.get(name, -1.0) < value]
        if moved or fallen:
            which = ", ".join((moved + fallen)[:4])
            raise CountersReset(
                f"counters went back or began anew between the snapshots: {which}",
                "the server restarted; measure again without a restart",
            )
        return Counters(delta, later.created, later.windowed, later.series)


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
        response = get(url)
        response.raise_for_status()
    except httpx.HTTPError as error:
        raise Unreadable(
            f"no metrics at {url}: {error}", "is the server up, and does it publish /metrics?"
        ) from error
    return response.text


def parse(text: str) -> Counters:
    """Counters of a Prometheus page (text format), summed over the labels; raises Unreadable.

    A series that is there under both of its names (with and without _total), or twice, counts once.
    """
    series: dict[Series, float] = {}
    created: dict[str, float] = {}
    windowed = set()
    for sample in samples(text):
        base = sample.name.removesuffix("_created").removesuffix("_total")
        labels = tuple(sorted(sample.labels.items()))
        if sample.name == BEGAN or (base in OURS and sample.name.endswith("_created")):
            created[f"{base}{dict(labels)}"] = sample.value
        elif sample.name in WINDOWED and sample.value > 0:
            windowed.add(sample.name)
        elif base in OURS and not 0 <= sample.value < MOST:
            raise Unreadable(f"{base}{dict(labels)} is {str(sample.value)[:30]}, no count", "read the page again")
        elif base in OURS and series.setdefault((base, labels), sample.value) != sample.value:
            raise Unreadable(
                f"{base}{dict(labels)} stands there twice, as {series[base, labels]:g} and {sample.value:g}",
                "is this the page of several servers strung together? give the /metrics of one",
            )
    told = {f"{base}{dict(labels)}": value for (base, labels), value in series.items()}
    return Counters(summed(series), created, tuple(sorted(windowed)), told)


def samples(text: str) -> list[Sample]:
    """All samples of a page; raises Unreadable."""
    try:
        return [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    except ValueError as error:
        raise Unreadable(
            f"this is no Prometheus text: {error}", "give the address of the /metrics page"
        ) from error


def summed(series: dict[Series, float]) -> dict[str, float]:
    """Values by our names, over all other labels (engine, model, API server)."""
    values: dict[str, float] = defaultdict(float)
    for (base, labels), value in series.items():
        name = OURS[base]
        values[f"{name}:{dict(labels).get('position', '')}" if name == "accepted_at" else name] += value
    return dict(values)
