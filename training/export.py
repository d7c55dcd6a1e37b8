"""The end of a run: a Hugging Face directory, and a record of how it came to be."""

import importlib.metadata
import json
import platform
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

import jax

from jspec import checkpoint
from training.data import Corpus, Windows
from training.data.tokenizer import END_OF_TEXT, save_tokenizer
from training.loop import Trainer, TrainState

PACKAGES = ("jax", "optax", "orbax-checkpoint", "tokenizers", "numpy")


def export(
    trainer: Trainer, state: TrainState, record: dict, corpus: Corpus, argv: Sequence[str]
) -> dict:
    """Writes ``OUT/export``: weights, tokenizer, generation defaults, ``provenance.json``.

    Returns the provenance, whose held-out losses were taken over every held-out window.
    """
    settings = trainer.settings
    directory = settings.out_dir / "export"
    tokenizer = corpus.tokenizer
    ids = dict.fromkeys(("bos_token_id", "eos_token_id"), tokenizer.token_to_id(END_OF_TEXT))
    config = settings.model_config()
    raw = checkpoint.hf_config(config) | ids
    checkpoint.save_pretrained(directory, config, state.params, raw, settings.export_dtype)
    save_tokenizer(tokenizer, directory, settings.max_positions)
    _write_json(directory / "generation_config.json", ids | {"do_sample": False})
    facts = provenance(trainer, state, record, corpus, argv)
    _write_json(directory / "provenance.json", facts)
    return facts


def provenance(
    trainer: Trainer, state: TrainState, record: dict, corpus: Corpus, argv: Sequence[str]
) -> dict:
    """Everything needed to know what the weights are, without a path of the machine."""
    settings, step = trainer.settings, int(state.step)
    held_out = trainer.evaluate(state.params, Windows(corpus.holdout, settings.length))
    return {
        "command": "python -m training.pretrain " + shlex.join(map(without_folders, argv)),
        "git": _git_sha(),
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
        "python": platform.python_version(),
        "device": jax.devices()[0].device_kind,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(state.params)),
        "steps": step,
        "tokens_seen": step * settings.batch * settings.length,
        "seconds": record["seconds"],
        "heldout": held_out,
        "segments": [
            part | {"teacher": without_folders(part["teacher"])} for part in record["segments"]
        ],
        "losses": record["losses"],
        "data": _describe(corpus.description),
    }


def without_folders(word: str) -> str:
    """A word of the command line, with only the last part of a path that is absolute."""
    return Path(word).name if word.startswith(("/", "~")) else word


def _describe(corpus: dict) -> dict:
    request = corpus["request"]
    sources = [
        f"Python {platform.python_version()} standard library" if source == "stdlib" else source
        for source in map(without_folders, request["sources"])
    ]
    return {"sources": sources, "heldout_modules": request["holdout"]} | {
        part: corpus[part] for part in ("train", "holdout")
    }


def _git_sha() -> str:
    """The commit of the checkout that runs, ``-dirty`` where its files differ from it."""
    here = Path(__file__).parent
    command = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found.stdout.strip()


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
