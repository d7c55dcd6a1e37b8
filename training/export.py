"""The end of a run: a Hugging Face directory, and a record of how it came to be."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from jspec import checkpoint
from jspec.models.decoder import DecoderConfig, DecoderParams
from training.data import Corpus
from training.data.tokenizer import END_OF_TEXT, save_tokenizer
from training.trainer import write_provenance


def export(
    directory: Path,
    config: DecoderConfig,
    params: DecoderParams,
    corpus: Corpus,
    dtype: str,
    provenance: Mapping[str, Any],
) -> None:
    """Writes weights, tokenizer, generation defaults and ``provenance.json`` into ``directory``.

    Every process may call it with the whole weights; the first one writes.
    """
    if jax.process_index():
        return
    tokenizer = corpus.tokenizer
    ids = dict.fromkeys(("bos_token_id", "eos_token_id"), tokenizer.token_to_id(END_OF_TEXT))
    raw = checkpoint.hf_config(config) | ids
    checkpoint.save_pretrained(directory, config, params, raw, dtype)
    save_tokenizer(tokenizer, directory, config.max_positions)
    defaults = json.dumps(ids | {"do_sample": False}, indent=2)
    (directory / "generation_config.json").write_text(defaults + "\n")
    write_provenance(directory, provenance)
