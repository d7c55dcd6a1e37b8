"""A target of more blocks than it had, to train further: what does drafting bring a deeper one?

    python -m benchmarks.deeper --target DIR --eagle3 DIR --times 2 --output OUT

Behind each block come ``times - 1`` copies of it whose outputs are zero, so that the model says
what it said until they are trained (block expansion, arXiv 2401.02415, section 3.1). ``OUT/target``
holds it, ``OUT/eagle3`` the head, which reads the same hidden states at their new places.
``training/README.md`` has the commands that train both on.
"""

import argparse
import dataclasses
import json
import shutil
from pathlib import Path

import jax.numpy as jnp

from jspec import checkpoint, loading
from jspec.models.decoder import LayerParams
from jspec.models.heads import eagle_layers


def deepen(source: Path, times: int, output: Path) -> None:
    """Writes the model of ``source`` with ``times`` as many blocks, and its tokenizer."""
    model = loading.load(source)
    layers = tuple(
        layer if copy == 0 else idle(layer)
        for layer in model.params.layers
        for copy in range(times)
    )
    config = dataclasses.replace(model.config, num_layers=len(layers))
    raw = model.raw_config | {"num_hidden_layers": len(layers)}
    params = model.params.replace(layers=layers)
    checkpoint.save_pretrained(output, config, params, raw)
    model.tokenizer.save_pretrained(output)
    if (source / "generation_config.json").exists():
        shutil.copy(source / "generation_config.json", output)


def idle(layer: LayerParams) -> LayerParams:
    """The block, adding nothing to the residual stream: both its output matrices are zero."""
    return layer.replace(output=jnp.zeros_like(layer.output), down=jnp.zeros_like(layer.down))


def move_head(source: Path, times: int, output: Path) -> None:
    """Copies the EAGLE-3 head of ``source``; it reads behind the blocks it has always read."""
    output.mkdir(parents=True)
    raw = json.loads((source / "config.json").read_text())
    raw.pop("eagle_config", None)  # where other programs look for the same numbers, less one
    raw[eagle_layers.LAYER_IDS] = [times * layer for layer in raw[eagle_layers.LAYER_IDS]]
    (output / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    shutil.copy(source / "model.safetensors", output)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="a deeper target, and its head")
    parser.add_argument("--target", type=Path, required=True, help="a plain dense decoder")
    parser.add_argument("--eagle3", type=Path, required=True, help="a head of it")
    parser.add_argument("--times", type=int, default=2, help="blocks for every one (default: 2)")
    parser.add_argument("--output", type=Path, required=True)
    asked = parser.parse_args()
    deepen(asked.target, asked.times, asked.output / "target")
    move_head(asked.eagle3, asked.times, asked.output / "eagle3")


if __name__ == "__main__":
    main()
