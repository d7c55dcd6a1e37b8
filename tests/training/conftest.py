"""A tiny corpus of source files and the settings of a run that takes seconds."""

import dataclasses

import pytest

from training import data, pretrain
from training.trainer import TrainerSettings

HELD_OUT = "secret"
MARK = "xylophone"  # a word that only the held-out module has


def _module(name: str, words: tuple[str, ...]) -> str:
    lines = [f"# module {name}, which holds functions of no use whatever"]
    for i, word in enumerate(words * 12):
        lines += [
            f"def {name}_{word}_{i}(value):",
            f'    """Returns {word} for {name}."""',
            f"    return value + {i}",
            "",
        ]
    return "\n".join(lines)


@pytest.fixture(scope="session")
def sources(tmp_path_factory):
    """A folder of three modules, one of them to be held out."""
    folder = tmp_path_factory.mktemp("sources")
    (folder / "alpha.py").write_text(_module("alpha", ("red", "green", "blue")))
    (folder / "beta").mkdir()
    (folder / "beta" / "inner.py").write_text(_module("beta", ("one", "two", "three")))
    (folder / f"{HELD_OUT}.py").write_text(_module(HELD_OUT, (MARK, "green", "blue")))
    return folder


@pytest.fixture(scope="session")
def corpus(sources, tmp_path_factory):
    """The tokenised corpus, shared by every run."""
    folder = tmp_path_factory.mktemp("corpus")
    return data.prepare(folder, [str(sources)], [HELD_OUT], vocab_size=300)


@pytest.fixture
def settings(corpus, tmp_path):
    """A run of 12 steps of a one-layer model."""
    return pretrain.Settings(
        text=pretrain.CorpusSettings(corpus=str(corpus.directory), length=32, eval_windows=4),
        model=pretrain.ModelSettings(
            vocab_size=300,
            hidden_size=32,
            intermediate_size=64,
            layers=1,
            heads=2,
            kv_heads=1,
            head_dim=16,
            max_positions=64,
        ),
        trainer=TrainerSettings(
            batch=4,
            accumulate=2,
            steps=12,
            warmup=2,
            decay=4,
            learning_rate=1e-2,
            eval_every=5,
            log_every=1,
            schedule="wsd",
            compute="float32",
        ),
        out=str(tmp_path / "run"),
    )


@pytest.fixture
def with_options(settings):
    """A function that changes fields of ``settings`` or of its parts."""

    def change(**options):
        parts = {}
        for part in ("text", "model", "trainer"):
            before = getattr(settings, part)
            names = {field.name for field in dataclasses.fields(before)} & options.keys()
            parts[part] = dataclasses.replace(before, **{n: options.pop(n) for n in names})
        return dataclasses.replace(settings, **parts, **options)

    return change
