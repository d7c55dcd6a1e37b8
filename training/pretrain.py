"""Trains a tokenizer and a small Llama-like language model: ``python -m training.pretrain``.

Run the same command again to resume: weights, optimiser and place in the data come back exactly.
Nothing is lost by stopping it (Ctrl-C, SIGTERM). At the end ``OUT/export`` holds the model in
Hugging Face layout with a provenance file.
"""

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from training import data, loop
from training.settings import Settings, parse


def run(settings: Settings, argv: Sequence[str]) -> dict:
    """Prepares the data, trains to the end or to a signal, exports. Returns the provenance."""
    corpus = open_corpus(settings)
    teacher = None
    if settings.teacher:
        from jspec import checkpoint

        teacher = checkpoint.load_pretrained(settings.teacher, "float32")[:2]
    trainer = loop.make_trainer(settings, teacher)
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
        TextColumn("{task.fields[loss]}"),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("training", total=settings.steps, loss="")

        def bar(step: int, metrics: dict) -> None:
            text = "  ".join(f"{k} {v:.3f}" for k, v in metrics.items() if k != "step")
            progress.update(task, completed=step, loss=text)

        state, record = loop.train(trainer, corpus, bar=bar)
    if int(state.step) < settings.steps:
        print(f"stopped and saved at step {int(state.step)}; run the same command to resume")
        return record
    from training.export import export

    return export(trainer, state, record, corpus, argv)


def open_corpus(settings: Settings) -> data.Corpus:
    """The run's tokenised data, built on first use."""
    if not settings.data:
        return data.open_corpus(settings.corpus_dir)
    return data.prepare(
        settings.corpus_dir, settings.data, settings.holdout, vocab_size=settings.vocab_size,
        package_paths=settings.package_paths,
        source_megabytes=settings.source_megabytes, max_length=settings.max_positions,
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """The command: 0, or 2 with one line on bad input."""
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        run(parse(argv), argv)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
