"""What a swap of a systemd service for a variant of it would change, worked out before anything is touched."""

from __future__ import annotations

import difflib
import re
import shlex
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from labkit import files, settings
from labkit.engine import launch, urls, variants
from labkit.engine.service import units
from labkit.engine.service.flags import SPECULATION
from labkit.engine.service.systemd import Manager, NoService, unit_name
from labkit.errors import LabError

LOAD_LIMIT_S = 100 * 60.0  # a model of a terabyte takes up to 90 minutes to load
SECRET = re.compile(r"((?:--api-key[ =]|\w*(?:KEY|TOKEN|SECRET|PASSWORD)\w*=)['\"]?)[^\s'\"]+", re.IGNORECASE)
SAME_NAMES = ("max_model_len", "max_num_seqs", "tensor_parallel_size", "seed")


class NotApplied(LabError):
    """A plan was used as if it had been carried out."""


class NoPort(LabError):
    """The port of a service cannot be read from its unit."""


@dataclass(frozen=True)
class SwapPlan:
    """A swap as data. `before` and `after` are unit texts; `url` without /v1; times in seconds."""

    service: str
    unit: str
    variant: str
    before: str
    after: str
    url: str
    model: str
    options: dict[str, Any]
    manager: Manager
    dependents: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    load_limit_s: float = LOAD_LIMIT_S
    patience_s: float = 60.0
    log: str = ""
    original_log: str = ""
    outputs: str = field(default_factory=lambda: str(settings.outputs()))

    @property
    def folder(self) -> Path:
        """Where the variant's unit, the state and the logs of this service's swaps lie."""
        return Path(self.outputs) / "swaps" / self.service.removesuffix(".service")

    @property
    def unit_path(self) -> Path:
        """The variant's unit, as written by the lab."""
        return self.folder / self.unit

    @property
    def port(self) -> int:
        """The port that both servers listen on."""
        return urls_port(self.url)

    @property
    def diff(self) -> str:
        """The variant's unit against the original, as a unified diff; keys and tokens are not shown."""
        lines = (SECRET.sub(r"\1(hidden)", text).splitlines(keepends=True) for text in (self.before, self.after))
        return "".join(difflib.unified_diff(*lines, fromfile=self.service, tofile=self.unit))

    def to_install(self) -> list[list[str]]:
        """Commands that make the variant's unit known; the original still runs."""
        return [self.manager.install(self.unit_path, self.unit), self.manager.words("daemon-reload")]

    def to_start(self) -> list[list[str]]:
        """Commands that stop the original, then start the variant."""
        return [self.manager.words("stop", self.service), self.manager.words("start", "--no-block", self.unit)]

    def to_restore(self) -> list[list[str]]:
        """Commands that put the original back, in order."""
        return [
            self.manager.words("stop", self.unit),
            self.manager.remove(self.unit),
            self.manager.words("daemon-reload"),
            self.manager.words("start", "--no-block", self.service),
            *([self.manager.words("start", "--no-block", *self.dependents)] if self.dependents else []),
        ]

    def __str__(self) -> str:
        stop, start = map(shlex.join, self.to_start())
        steps = [*map(shlex.join, self.to_install()), stop]
        steps += ["# wait: its processes are gone, the GPU's memory is back, nobody listens on the port", start]
        steps += [f"# wait: {self.url}/health answers (at most {self.load_limit_s / 60:.0f} minutes)"]
        steps += ["# ... the experiment ...", *map(shlex.join, self.to_restore())]
        steps += [f"# wait: {self.url}/health answers"]
        notes = "".join(f"\nnote: {note}" for note in self.notes)
        return f"{self.diff}\n" + "\n".join(steps) + notes

    def _repr_markdown_(self) -> str:
        return f"```diff\n{self.diff}```\n```\n{str(self).removeprefix(self.diff).strip()}\n```"

    def __enter__(self) -> Any:
        raise NotApplied(
            f"{self.service} was not swapped: this is only the plan",
            "engine.swap(plan, apply=True) carries it out",
        )

    def __exit__(self, *_: object) -> None:
        """Nothing was entered."""

    def as_json(self) -> dict[str, Any]:
        """The plan as JSON holds it, without the unit texts, which may hold keys."""
        return asdict(self) | {"before": "", "after": ""}

    @classmethod
    def of_json(cls, stored: dict[str, Any]) -> Self:
        """The plan that `as_json` wrote."""
        manager = stored["manager"]
        made = stored | {
            "manager": Manager(tuple(manager["systemctl"]), manager["user"], manager["unit_dir"]),
            "dependents": tuple(stored["dependents"]),
            "notes": tuple(stored["notes"]),
        }
        return cls(**made)


def plan(
    service: str,
    variant: str,
    *,
    systemctl: str = "systemctl",
    user: bool = False,
    unit_dir: Path | str = "",
    url: str = "",
    load_limit_s: float = LOAD_LIMIT_S,
    patience_s: float = 60.0,
    **options: Any,
) -> SwapPlan:
    """The swap of a systemd service for a variant of it; changes nothing but outputs/swaps/.

    `options` are the variant's. `unit_dir`: where the variant's unit goes, and where NAME.service is read when it
    is there; else systemd is asked. `url`: where the service answers, if its unit does not say. `patience_s`: how
    long processes, memory and port of a stopped server may take to go.
    Raises NoService, UnitUnreadable, UnknownVariant, NoPort.
    """
    name = unit_name(service)
    manager = Manager(tuple(shlex.split(systemctl)), user, str(Path(unit_dir).absolute()) if unit_dir else "")
    before = manager.text(name)
    stem, at, instance = name.removesuffix(".service").partition("@")
    text = units.instantiated(before, instance) if at else before
    words = variants.options_of(variant, refused_port(options))
    after = units.with_flags(text, own_flags(variant, words, options), SPECULATION)
    after = units.second(after, name, variant, variants.environment_of(variant, words))
    arguments = units.arguments(after)
    dependents, notes = facts(manager, name, before, words)
    found = SwapPlan(
        service=name,
        unit=f"{stem}-{instance}-{variant}.service" if at else f"{stem}-{variant}.service",
        variant=variant,
        before=before,
        after=after,
        url=urls.root_url(url) if url else address(arguments),
        model=arguments.get("served-model-name") or arguments.get("model", ""),
        options=options,
        manager=manager,
        dependents=dependents,
        notes=notes,
        load_limit_s=load_limit_s,
        patience_s=patience_s,
        log=log_of(after),
        original_log=log_of(before),
    )
    with files.atomic(found.unit_path) as temporary:
        temporary.touch(mode=0o600)
        temporary.write_text(after)
    return found


def log_of(text: str) -> str:
    """The file that a unit's output goes to; empty for the journal, or where specifiers hide the name."""
    lines = units.lines_of(text)
    for key in ("StandardError", "StandardOutput"):
        kind, _, path = units.setting(lines, "Service", key).partition(":")
        if kind in ("append", "file", "truncate") and "%" not in path:
            return path
    return ""


def refused_port(options: dict[str, Any]) -> dict[str, Any]:
    """The options, which may not change the port: those who use the service know it by that."""
    if "port" in options:
        raise variants.UnknownVariant("a swapped service keeps its port", "leave `port` out")
    return options


def own_flags(variant: str, options: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """The flags that a variant and the options that were given ask for, without the lab's own base."""
    chosen = set(given).union(*(each.options for each in variants.lineage(variant)))
    common = {name.replace("_", "-"): options[name] for name in SAME_NAMES if name in chosen}
    return common | variants.own_flags(variant, options, on_cpu=launch.on_cpu()) | options["flags"]


def address(arguments: dict[str, str]) -> str:
    """Where a server with these arguments answers, from this machine; raises NoPort."""
    port = arguments.get("port", "8000")
    host = arguments.get("host", "")
    if not port.isdigit():
        raise NoPort(
            f"the service's port is {port!r}, which its unit does not spell out", "give its address as url"
        )
    host = "127.0.0.1" if host in ("", "0.0.0.0", "::", "[::]", "localhost") else host
    scheme = "https" if "ssl-certfile" in arguments else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def urls_port(url: str) -> int:
    """The port of an address; raises NoPort without one."""
    found = re.search(r":(\d+)$", url)
    if not found:
        raise NoPort(f"{url} has no port", "give it as http://host:port")
    return int(found.group(1))


def facts(
    manager: Manager, name: str, text: str, options: dict[str, Any]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Units that stop when this one stops, and what a person should know before it is stopped."""
    try:
        shown = manager.show(name)
    except NoService:  # planned on another machine, from a copy of the unit
        return (), ("systemd was not asked: the plan comes from the unit file alone",)
    tied = [unit for key in ("RequiredBy", "BoundBy", "ConsistsOf") for unit in shown.get(key, "").split()]
    dependents = tuple(unit for unit in dict.fromkeys(tied) if manager.state(unit) == "active")
    notes = []
    if shown.get("ActiveState") != "active":
        notes.append(f"{name} is {shown.get('ActiveState')}, not active: apply will refuse")
    if dependents:
        notes.append(f"{', '.join(dependents)} stop with it and are started again at the end")
    if shown.get("TriggeredBy"):
        notes.append(f"{shown['TriggeredBy']} may start {name} in the middle, which ends the variant")
    if shown.get("NeedDaemonReload") == "yes":
        notes.append(f"{name} changed on disk since it was loaded: it comes back as it is on disk")
    if re.search(r"\b(docker|podman)\b", units.setting(units.lines_of(text), "Service", "ExecStart")):
        notes.append(
            "a container: its processes are not the unit's, so GPU memory is only watched until it is steady"
        )
    if options["environment"] and units.setting(units.lines_of(text), "Service", "EnvironmentFile"):
        notes.append("variables of EnvironmentFile override the variant's own of the same name")
    return dependents, tuple(notes)
