"""Tiny models of transformers with random weights, and what they compute."""

import functools
import math
from pathlib import Path

import numpy as np
import pytest

from tests.families import rows, table
from tests.families.prompts import PROMPTS

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

NEW_TOKENS = 64
PROMPT_LENGTHS = tuple(map(len, PROMPTS))
GAIN = 1.5  # Matrices are so large that logits are distinct and states matter.
DRAWN_BUFFERS = ("e_score_correction_bias", "layer_scalar")


@functools.cache
def model(case: str):
    """Return the model of a case of the table."""
    return made(*table.CASES[case], seed=len(case))


def made(kind: str, keys: dict, seed: int):
    """Return a model: matrices of std ``GAIN`` / sqrt(inputs), vectors moved by 0.2."""
    torch.set_num_threads(1)
    text, whole = rows.SIZES | keys, table.ROWS[kind].whole
    if whole is None:
        config = transformers.AutoConfig.for_model(kind, **text)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
    else:
        config = transformers.AutoConfig.for_model(whole[0], text_config=text, **whole[1])
        model = transformers.AutoModelForImageTextToText.from_config(config).eval()
    generator = torch.Generator().manual_seed(seed)
    buffers = [x for name, x in model.named_buffers() if name.endswith(DRAWN_BUFFERS)]
    with torch.no_grad():
        decays = {id(x) for name, x in model.named_parameters() if name.endswith("A_log")}
        for parameter in [*model.parameters(), *buffers]:
            drawn = torch.randn(parameter.shape, generator=generator)
            if id(parameter) in decays:
                parameter.copy_(drawn - 3)  # The states last for tens of tokens.
            elif parameter.ndim > 1:
                parameter.copy_(drawn * GAIN / math.sqrt(parameter.shape[-1]))
            else:
                parameter.add_(0.2 * drawn)
    return model


def saved(case: str, folder: Path) -> Path:
    """Return the directory of a case's checkpoint below ``folder``, written on first use."""
    directory = folder / case
    if not directory.exists():
        model(case).save_pretrained(directory)
    return directory


@functools.cache
def states(case: str) -> list[tuple[np.ndarray, list[np.ndarray]]]:
    """Return the logits [T, V] of each prompt, and its hidden states [T, D]."""
    rows = []
    for prompt in PROMPTS:
        with torch.no_grad():
            out = model(case)(torch.tensor([prompt]), output_hidden_states=True)
        rows.append((out.logits[0].numpy(), [x[0].numpy() for x in out.hidden_states]))
    return rows


@functools.cache
def generated(case: str) -> list[tuple[list[int], np.ndarray]]:
    """Return the greedy tokens after each prompt, and the logits [T, V] that predicted them."""
    rows = []
    for prompt in PROMPTS:
        out = model(case).generate(
            torch.tensor([prompt]),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
            use_cache=True,
        )
        logits = torch.cat(out.logits).numpy()
        assert len(logits) == NEW_TOKENS
        rows.append((out.sequences[0, len(prompt) :].tolist(), logits))
    return rows
