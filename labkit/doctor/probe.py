"""A small run through every seam of the installed versions: version lists alone do not tell what broke."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from labkit import acceptance, conversations, draft, engine, extract, settings, targets, train, vocab
from labkit.engine import bounds, urls
from labkit.errors import LabError

SAMPLES, HELD_OUT, MAX_TOKENS, DRAFT_VOCAB, MAX_LENGTH = 8, 2, 48, 1024, 256


class ProbeFailed(LabError):
    """A seam is broken; `seam` names it."""

    def __init__(self, seam: str, what: str, remedy: str) -> None:
        super().__init__(what, remedy)
        self.seam = seam


class NoCompletion(LabError):
    """A server that started does not complete a prompt."""


@dataclass(frozen=True)
class Outcome:
    """A seam that held: what it gave and how long it took."""

    seam: str
    found: str
    seconds: float

    def __str__(self) -> str:
        return f"ok   {self.seam:<22} {self.found} ({self.seconds:.0f} s)"


@dataclass
class Probe:
    """What the seams hand on to one another."""

    target_name: str
    layers_text: str
    head: str
    folder: Path
    target: targets.Target = field(init=False)
    layers: tuple[int, ...] = ()

    @property
    def head_dir(self) -> Path:
        """The head to serve: the given one, else the one that the probe trained."""
        return Path(self.head) if self.head else self.folder / "head"

    def serve(self, variant: str, **options: Any) -> AbstractContextManager[engine.Server]:
        """A server of the probed target, its log in the probe's folder."""
        return engine.serve(
            self.target, variant, log_dir=self.folder, max_model_len=MAX_LENGTH, max_num_seqs=16, **options
        )

    def resolve(self) -> str:
        """The target's files, and its layers."""
        self.target = targets.resolve(self.target_name)
        return f"{self.target.name} at revision {self.target.revision}"

    def choose_layers(self) -> str:
        """Layer ids that the target has."""
        self.layers = extract.layers_of(self.layers_text, self.target.geometry.num_hidden_layers)
        return f"states entering layers {', '.join(map(str, self.layers))}, and the last layer's output"

    def check_head(self) -> str:
        """The configuration and tensors of the head that will be served."""
        problems = [one for one in draft.preflight(self.head_dir, self.target) if one.fatal]
        if problems:
            raise LabError(f"{self.head_dir}: {'; '.join(problems)}", "export the head anew with `labkit run 04`")
        return "configuration and tensors fit the target"

    def generate(self) -> str:
        """Answers by the target through vLLM's server, with their token ids."""
        prompts = conversations.split(conversations.templated(), SAMPLES, HELD_OUT, seed=0)
        with self.serve("baseline") as server:
            rows = conversations.collect(
                prompts, server, self.folder / "data", max_length=MAX_LENGTH, max_tokens=MAX_TOKENS, concurrency=5
            )
        return f"{len(rows)} samples, {int(rows.answer_tokens.sum())} answer tokens"

    def extract(self) -> str:
        """Hidden states through vLLM's connector."""
        states = self.folder / "hidden_states"
        with self.serve("extract", layers=self.states_layers, storage=self.folder / "raw") as server:
            extract.run(
                self.folder / "data", server, states, target=self.target, layers=self.layers, concurrency=5
            )
        return f"{len(list(states.glob('hs_*.safetensors')))} files of states"

    @property
    def states_layers(self) -> list[int]:
        """The ids that the extracting server gets: the head's and the last output's."""
        return [*self.layers, self.target.geometry.num_hidden_layers]

    def verify(self) -> str:
        """The states belong to their tokens, and the last one predicts the next token."""
        problems = extract.verify(self.folder / "hidden_states")
        if len(problems):
            raise LabError(
                f"{len(problems)} problems, the first: {problems.iloc[0].to_dict()}",
                "layer ids or connector do not fit this vLLM; see labkit/connector.py and the server log",
            )
        return "finite, non-zero, as long as their tokens, top-1 agrees with the next token"

    def train(self) -> str:
        """A few optimiser steps on a fresh head."""
        chosen = settings.Eagle3Pipeline(target=self.target_name, scale="smoke", draft_vocab_size=DRAFT_VOCAB)
        data = self.folder / "data"
        rows = conversations.load(data)
        counts = vocab.count(rows.input_ids, rows.loss_mask, self.target.geometry.vocab_size)
        mapping = vocab.build(counts, DRAFT_VOCAB)
        train.run(
            chosen,
            target=self.target,
            dataset_dir=data,
            hidden_dir=self.folder / "hidden_states",
            vocab=mapping,
            out_dir=self.folder,
            layers=self.layers,
        )
        return f"a head with {DRAFT_VOCAB} draft tokens"

    def speculate(self) -> str:
        """The head served by vLLM: one completion, and counters that say it drafted."""
        with self.serve("eagle3", head=self.head_dir, num_speculative_tokens=3) as server:
            before = acceptance.snapshot(server.metrics_url)
            text = completion(server)
            found = acceptance.between(before, acceptance.snapshot(server.metrics_url))
        if not found.drafts:
            raise LabError("the engine drafted nothing", "see the eagle3 server's log")
        return f"{text!r}, {found.drafts} drafts, acceptance length {found.mean_length:.2f}"


def completion(server: engine.Server) -> str:
    """The beginning of what a server says to a prompt; raises NoCompletion, NoAnswer, and EngineDied."""
    body = {"model": server.model, "prompt": "The capital of France is", "max_tokens": 24, "temperature": 0}
    url = f"{server.base_url}/completions"
    try:
        reply = urls.post(url, body, timeout=120)
        return " ".join(reply["choices"][0]["text"].split())[:40]
    except httpx.HTTPError as error:
        server.check()
        raise NoCompletion(f"{url} did not answer: {error}", "see the server's log") from error
    except (LookupError, TypeError, AttributeError) as error:
        raise bounds.no_answer(url, reply) from error


def seams(probe: Probe) -> Iterator[tuple[str, Callable[[], str]]]:
    """Name and check of each seam, in order; what needs no server comes first."""
    yield "target", probe.resolve
    yield "layer ids", probe.choose_layers
    if probe.head:
        yield "head", probe.check_head
    yield "generate", probe.generate
    yield "extract", probe.extract
    yield "check states", probe.verify
    yield "train", probe.train
    if not probe.head:
        yield "head", probe.check_head
    yield "serve the head", probe.speculate


def probe(
    target: str = "smollm2", *, layers: str = "", head: str = "", folder: Path | None = None
) -> Iterator[Outcome]:
    """Go through every seam on the installed versions, yielding an Outcome for each that holds.

    `layers` probes other layer ids than the default, `head` serves a given head instead of the one trained here.
    Raises ProbeFailed at the first broken seam, naming it, its cause and the folder with the server logs.
    """
    folder = folder or settings.outputs() / "doctor-probe"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    state = Probe(target, layers, head, folder)
    for name, check in seams(state):
        started = time.monotonic()
        try:
            found = check()
        except Exception as error:  # whatever a drifted version raises belongs to this seam
            raise ProbeFailed(
                name,
                f"BROKEN seam {name!r}: {type(error).__name__}: {getattr(error, 'what', error)}",
                f"{getattr(error, 'remedy', '') or 'compare the versions with `labkit doctor`'}; logs: {folder}",
            ) from error
        yield Outcome(name, found, time.monotonic() - started)
    shutil.rmtree(folder, ignore_errors=True)
