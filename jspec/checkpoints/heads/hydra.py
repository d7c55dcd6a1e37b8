"""Hydra heads in files: which config.json makes which ``HydraConfig``, and the tensors' names.

One layout, ``hydra``, the authors' hydra_lm_head.pt. Block j of head i is ``hydra_mlp.{i}.{j}``:
``linear``, and for the first ``res_connection`` too; its output is ``hydra_lm_head.{i}``. Heads
with a prefix layer, ``prefix_embeding_layer`` (so spelled), have a dropout before everything, so
their blocks are ``hydra_mlp.{i}.{1 + 2 j}`` and their outputs ``hydra_lm_head.{i}.1``.

Heads and blocks are counted from the tensors. In the authors' program the blocks of a head after
the first are one and the same: such copies are read as one weight, and written again.
"""

import dataclasses
import re
from collections.abc import Mapping

import numpy as np

from jspec.checkpoints.families import common
from jspec.checkpoints.families.names import Entry, block_table, blocks, nest
from jspec.models.decoder import DecoderConfig
from jspec.models.heads.hydra import HydraConfig, HydraParams, JoiningParams, PrefixParams
from jspec.models.heads.medusa import BlockParams
from jspec.util.messages import shown

ARCHITECTURES = ("mlp", "prefix-mlp")  # of four that the authors tried
PREFIX = "prefix_embeding_layer"
# A copy of the target's embedding, which training leaves as it is; and the prefix layer is built
# with an embedding that nothing reads.
UNUSED = ("input_embed_fn.weight", f"{PREFIX}.embed_tokens.weight")
_BLOCK = re.compile(r"hydra_mlp\.(\d+)\.(\d+)\.linear\.weight")


# Reading.


def layout(tensors: Mapping[str, np.ndarray]) -> str | None:
    """The layout that the tensors' names have, or None."""
    return "hydra" if any(_BLOCK.fullmatch(name) for name in tensors) else None


def read(raw: dict, tensors: Mapping[str, np.ndarray], target: DecoderConfig) -> HydraConfig:
    """The heads that a config.json and its tensors describe, for ``target``.

    Raises:
      ValueError: a key is malformed or not supported, or the heads were made for another target.
    """
    check_architecture(raw)
    prefixed = any(name.startswith(f"{PREFIX}.") for name in tensors)
    stated = raw.get("hydra_head_arch", ARCHITECTURES[prefixed])
    if stated != ARCHITECTURES[prefixed]:
        raise ValueError(
            f"hydra_head_arch is {shown(stated)}, but the tensors are those of "
            f"{ARCHITECTURES[prefixed]!r}"
        )
    found = [match for name in tensors if (match := _BLOCK.fullmatch(name))]
    num_heads, _ = common.counted([(match[1], "0") for match in found], len(tensors))
    num_layers = len({match[2] for match in found})
    width, hidden = tensors[found[0][0]].shape[:1], target.hidden_size
    if width != (hidden,):
        raise ValueError(
            f"the heads were made for another target: they are {width} wide, and the target's "
            f"hidden size is {hidden}"
        )
    if not any(name.endswith(".res_connection.weight") for name in tensors):
        raise ValueError(
            "heads that do not see what was drafted (grounded_heads=False) are not supported; "
            "export them as Medusa heads"
        )
    offset = common.whole({"hidden_state_offset": 0} | raw, "hidden_state_offset", least=0)
    if offset > target.num_layers:
        raise ValueError(
            f"hidden_state_offset is {offset}, but the target has {target.num_layers} layers"
        )
    config = HydraConfig(
        num_heads=num_heads,
        num_layers=num_layers,
        hidden_size=hidden,
        vocab_size=target.vocab_size,
        capture_layers=(target.num_layers - offset,),
        output_bias=any(re.fullmatch(r"hydra_lm_head\.\d+\.(1\.)?bias", name) for name in tensors),
        network=network(target) if prefixed else None,
    )
    tied = num_layers > 2 and _repeated(dataclasses.replace(config, tie_blocks=True), tensors)
    return dataclasses.replace(config, tie_blocks=tied)


def check_architecture(raw: dict) -> None:
    """Raises where config.json names heads that are not supported.

    Raises:
      ValueError: naming those that are.
    """
    stated = raw.get("hydra_head_arch")
    if stated not in (None, *ARCHITECTURES):
        known = " and ".join(map(repr, ARCHITECTURES))
        raise ValueError(f"hydra_head_arch={shown(stated)} is not supported, only {known}")


def network(target: DecoderConfig) -> DecoderConfig:
    """The prefix layer for a target: one block like its own."""
    return dataclasses.replace(target, num_layers=1, windows=target.windows[:1])


def _repeated(config: HydraConfig, tensors: Mapping[str, np.ndarray]) -> bool:
    same = lambda one, other: one in tensors and np.array_equal(tensors[one], tensors[other])
    pairs = repeats(config).items()
    return all(first in tensors and same(name, first) for name, first in pairs)


def repeats(config: HydraConfig) -> dict[str, str]:
    """Names of copies of tied blocks, and the name that each is a copy of."""
    if not config.tie_blocks:
        return {}
    return {
        f"{_block(config, head, layer)}.linear.{kind}": f"{_block(config, head, 1)}.linear.{kind}"
        for head in range(config.num_heads)
        for layer in range(2, config.num_layers)
        for kind in ("weight", "bias")
    }


required_repeats = repeats


def _block(config: HydraConfig, head: int, layer: int) -> str:
    return f"hydra_mlp.{head}.{layer if config.network is None else 1 + 2 * layer}"


# Both ways.


def table(config: HydraConfig, kind: str) -> tuple[Entry, ...]:
    """Names of the tensors."""
    del kind
    size, vocab, entries = config.hidden_size, config.vocab_size, []

    def affine(path: tuple, fields: tuple[str, str], name: str, inputs: int) -> None:
        weight, bias = ((*path, field) for field in fields)
        entries.append(Entry(weight, (f"{name}.weight",), ((size, inputs),), transpose=True))
        entries.append(Entry(bias, (f"{name}.bias",), ((size,),)))

    for head in range(config.num_heads):
        first, path, inputs = _block(config, head, 0), ("joining", head), (2 + head) * size
        affine(path, ("weight", "bias"), f"{first}.linear", inputs)
        affine(path, ("residual", "residual_bias"), f"{first}.res_connection", inputs)
        for layer in range(1, config.separate_blocks):
            name = f"{_block(config, head, layer)}.linear"
            affine(("blocks", head, layer - 1), ("weight", "bias"), name, size)
        name = f"hydra_lm_head.{head}" + ".1" * (config.network is not None)
        output = Entry(("outputs", head), (f"{name}.weight",), ((vocab, size),), transpose=True)
        entries.append(output)
        if config.output_bias:
            entries.append(Entry(("output_biases", head), (f"{name}.bias",), ((vocab,),)))
    if config.network is not None:
        entries += [
            dataclasses.replace(entry, path=("prefix", *entry.path))
            for entry in block_table(config.network, 0, f"{PREFIX}.layers.0")
        ]
        entries.append(Entry(("prefix", "norm"), (f"{PREFIX}.norm.weight",), ((size,),)))
    return tuple(entries)


def assemble(entries: tuple[Entry, ...], arrays: list) -> HydraParams:
    """Parameters from one array for each entry."""
    nested = nest(entries, arrays)
    in_order = lambda found: tuple(found[index] for index in sorted(found))
    later = nested.get("blocks", {})
    prefix = nested.get("prefix")
    if prefix is not None:
        prefix = PrefixParams(layers=blocks(prefix), **prefix)
    return HydraParams(
        joining=tuple(JoiningParams(**each) for each in in_order(nested["joining"])),
        blocks=tuple(
            tuple(BlockParams(**block) for block in in_order(later.get(head, {})))
            for head in sorted(nested["joining"])
        ),
        outputs=in_order(nested["outputs"]),
        output_biases=in_order(nested.get("output_biases", {})),
        prefix=prefix,
    )


# Writing.


def describe(config: HydraConfig, kind: str, target: DecoderConfig, base_model: str) -> dict:
    """A config.json for ``config`` as the authors' loader reads it.

    Raises:
      ValueError: the heads' prefix layer is not a block like the target's.
    """
    del kind
    if config.network is not None and config.network != dataclasses.replace(
        network(target),
        cache_dtype=config.network.cache_dtype,
        activation_dtype=config.network.activation_dtype,
        attention=config.network.attention,
    ):
        raise ValueError("layout='hydra' has no place for a prefix layer unlike the target's")
    return {
        "hydra_num_heads": config.num_heads,
        "hydra_num_layers": config.num_layers,
        "hydra_head_arch": ARCHITECTURES[config.network is not None],
        "grounded_heads": True,
        "hidden_state_offset": target.num_layers - config.capture_layers[0],
        "base_model_name_or_path": base_model,
    }
