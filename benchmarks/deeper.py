"""A deeper copy of a target and its head, to train further.

    python -m benchmarks.deeper --target DIR --eagle3 DIR --times 2 --output OUT

Each block is followed by ``times - 1`` copies whose outputs are zero, so the model computes the
same function until they are trained (block expansion, arXiv 2401.02415, section 3.1).
``OUT/target`` is the model, and ``OUT/eagle3`` the head, which reads the same hidden states at
their new layers. ``training/README.md`` has the commands that train both.
"""

import argparse
import dataclasses
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jspec.checkpoints import checkpoint, loading
from jspec.checkpoints.heads import head_files
from jspec.checkpoints.loading import LoadedModel
from jspec.models.decoder import DecoderConfig, LayerParams


def deepen(model: LoadedModel, times: int, output: Path) -> DecoderConfig:
    """Write the model with ``times`` as many blocks, and its tokenizer; return its config.

    Raises:
      ValueError: the model has windows or experts.
    """
    if any(model.config.windows) or model.config.has_experts:
        raise ValueError("--target has windows or experts; take one of plain blocks")
    layers = tuple(
        layer if copy == 0 else idle(layer)
        for layer in model.params.layers
        for copy in range(times)
    )
    repeated = tuple(layer for layer in model.config.layers for _ in range(times))
    config = dataclasses.replace(model.config, layers=repeated)
    raw = model.raw_config | {"num_hidden_layers": len(layers)}
    params = model.params.replace(layers=layers)
    checkpoint.save_pretrained(output, config, params, raw)
    model.tokenizer.save_pretrained(output)
    return config


def idle(layer: LayerParams) -> LayerParams:
    """Return the block with zero outputs of its two halves, which adds nothing to the residual."""

    def without(part: Any, *ends: str) -> Any:
        zeros = {name: jax.tree.map(jnp.zeros_like, vars(part)[name]) for name in ends}
        return part.replace(**zeros)

    return layer.replace(
        mixer=without(layer.mixer, "output", "output_bias"),
        feed_forward=without(layer.feed_forward, "down", "down_bias"),
    )


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="a deeper target and its head")
    parser.add_argument("--target", type=Path, required=True, help="a decoder of plain blocks")
    parser.add_argument("--eagle3", type=Path, required=True, help="its head")
    parser.add_argument("--times", type=int, default=2, help="blocks for each block (default: 2)")
    parser.add_argument("--output", type=Path, required=True)
    asked = parser.parse_args()
    if asked.times < 2:
        parser.error(f"--times {asked.times} makes nothing deeper; take 2 or more")
    try:
        model = loading.load(asked.target)
        head = loading.load_head(asked.eagle3, model.config, kind="eagle3")
        deeper = deepen(model, asked.times, asked.output / "target")
    except ValueError as error:
        parser.error(str(error))
    generation = asked.target / "generation_config.json"
    if generation.exists():
        shutil.copy(generation, asked.output / "target")
    captured = tuple(asked.times * layer for layer in head.config.capture_layers)
    moved = dataclasses.replace(head.config, capture_layers=captured)
    head_files.save_head(asked.output / "eagle3", moved, head.params, deeper)


if __name__ == "__main__":
    main()
