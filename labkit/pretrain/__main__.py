"""`python -m labkit.pretrain`: generate, train, export, card."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from labkit import command, files, settings
from labkit.command import report

if TYPE_CHECKING:
    import pandas as pd
    from transformers import PreTrainedTokenizerFast

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
TINY = 8  # documents of each side of the split


@app.command()
def generate(
    smollm2: Annotated[Path, typer.Option(help="SmolLM2-135M-Instruct, converted (targets.resolve('smollm2'))")],
    out: Annotated[Path, typer.Option(help="folder for generated-NN.parquet")],
    seconds: Annotated[float, typer.Option(help="time for all of it, the engine's start included")] = 240.0,
    streams: Annotated[int, typer.Option(help="answers written at a time")] = 512,
    seed: int = 0,
) -> None:
    """Let SmolLM2 write conversations, in this process."""
    from labkit.pretrain import generate

    generate.run(smollm2, out, seconds=seconds, streams=streams, seed=seed, report=report)


def prepared(conversations: Path, out: Path) -> tuple[pd.DataFrame, PreTrainedTokenizerFast]:
    """The corpus and the tokenizer in `out`, made from the conversations where they are not there yet."""
    from labkit.pretrain import chat, corpus

    if (out / corpus.FILE).is_file():
        frame = files.read_parquet(out / corpus.FILE)
    else:
        frame = corpus.build(conversations, out)
    sizes = frame.groupby(["split", "category"]).text.agg(["count", lambda texts: texts.str.len().sum()])
    report("documents and characters\n" + sizes.to_string(header=False))
    folder = out / "tokenizer"
    if not folder.is_dir():
        model = files.read_json(settings.root() / "data" / "models" / "mini-kimi.json")
        texts = corpus.bare(frame[frame.split == "train"].text)
        chat.train_tokenizer(texts, folder, model["text_config"]["vocab_size"])
    tokenizer = chat.load_tokenizer(folder)
    report(f"tokenizer of {len(tokenizer)} tokens")
    return frame, tokenizer


@app.command()
def train(
    out: Annotated[
        Path, typer.Option(help="folder for corpus.parquet, tokenizer and model; what is there is used")
    ],
    conversations: Annotated[Path, typer.Option(help="folder that `generate` wrote to")] = Path(),
    seconds: Annotated[float, typer.Option(help="time for the training alone")] = 240.0,
    steps: Annotated[int, typer.Option(help="end after so many steps, if sooner")] = 1_000_000,
    device: str = "cuda",
    rows: Annotated[int, typer.Option(help="packs a step")] = 32,
    length: Annotated[int, typer.Option(help="tokens a pack")] = 1024,
    learning_rate: float = 2e-3,
    warm_up: Annotated[int, typer.Option(help="steps")] = 100,
    resume: Annotated[bool, typer.Option(help="go on from the model in `out`; else it is new")] = False,
    tiny: Annotated[bool, typer.Option(help="a few documents alone: a trial of the whole path")] = False,
    seed: int = 0,
) -> None:
    """Corpus, tokenizer, packs, training; the model with the lowest held-out loss stays in `out`/model."""
    from labkit.pretrain import corpus, loop

    frame, tokenizer = prepared(conversations, out)
    if tiny:
        frame = frame.groupby("split").head(TINY)
    packs = {}
    for split, part in frame.groupby("split"):
        packs[split] = corpus.pack(corpus.encode(tokenizer, part.text), length)
        shape, filled = packs[split].tokens.shape, packs[split].filled
        report(f"{split}: {shape[0]} packs of {shape[1]} tokens, {filled:.1%} filled")
    model = loop.open_model(out / "model", device) if resume else loop.new_model(device, seed)
    plan = loop.Plan(
        seconds=seconds, steps=steps, rows=rows, learning_rate=learning_rate, warm_up=warm_up, seed=seed
    )
    weights, experts = sum(p.numel() for p in model.parameters()), model.config._experts_implementation
    report(f"{weights:,} weights on {model.device}, experts {experts}")
    loop.run(model, packs["train"], packs["held-out"], plan, out, report)


@app.command()
def export(
    run: Annotated[Path, typer.Option(help="folder of `train`")],
    out: Annotated[Path | None, typer.Option(help="where to; data/targets/mini-kimi where left out")] = None,
) -> None:
    """Write the trained text model as a Kimi-K2.5 checkpoint, with its tokenizer and held-out text."""
    from labkit.pretrain import export
    from labkit.targets import mini_kimi

    report(f"wrote {export.run(run, out or mini_kimi.shipped())}")


@app.command()
def card(target: Annotated[str, typer.Option(help="a shipped name or a folder")] = "mini-kimi") -> None:
    """Compute the card's figures from the target's files alone and write card.json and README.md there."""
    from labkit import targets
    from labkit.pretrain import card

    found = targets.resolve(target)
    card.make(found, report)
    report(f"wrote {found.path / card.PAGE}")


if __name__ == "__main__":
    command.run(app)
