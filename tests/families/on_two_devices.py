"""Logits of checkpoints whose weights two devices share; prints one JSON a directory.

Its arguments are a number of devices and directories. test_two_devices.py runs this in a process
where one CPU simulates eight devices.
"""

import functools
import json
import sys
from pathlib import Path

import jax
import numpy as np

from jspec.checkpoints import checkpoint
from jspec.core import trees
from jspec.models import decoder, partition
from jspec.sharding import mesh as mesh_lib
from tests.families.prompts import PROMPTS


@functools.partial(jax.jit, static_argnames="config")
def logits_of(params, config, tokens):
    """Return the logits of one pass without a cache."""
    cache = decoder.init_cache(config, len(tokens), 0)
    return decoder.forward(params, config, tokens, trees.chain_tree(*tokens.shape), cache).logits


def on_several(directory: str, ways: int) -> dict:
    """Return the logits of the longest prompt, or why the model is not divided.

    "apart" are those with some experts on each device, if there are experts.
    """
    config, _ = checkpoint.load_config(directory)
    try:
        partition.split(config, ways)
    except ValueError as error:
        return {"refused": str(error)}
    forms = {"logits": config}
    if config.has_experts:
        forms["apart"] = partition.by_experts(config)
    return {name: _logits(directory, form, ways) for name, form in forms.items()}


def _logits(directory: str, config: decoder.DecoderConfig, ways: int) -> list:
    parts, mesh = partition.split(config, ways), mesh_lib.make(ways)
    placements = partition.placements(partition.rules(config, ways), mesh)
    params = checkpoint.load_pretrained(directory, sharding=placements)[1]
    with mesh_lib.on(mesh):
        logits = logits_of(params, parts, np.array(PROMPTS[0], np.int32)[None])
    return np.asarray(logits)[0].tolist()


def main(ways: str, *directories: str):
    for directory in directories:
        result = on_several(directory, int(ways))
        print(json.dumps({"case": Path(directory).name} | result), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
