"""Hydra heads in files: config.json to ``HydraConfig``, and the names of the tensors.

One layout, ``hydra``, the authors' hydra_lm_head.pt. Block j of head i is ``hydra_mlp.{i}.{j}``:
``linear``, and for the first ``res_connection`` too. Its output is ``hydra_lm_head.{i}``. Heads
with a prefix layer, ``prefix_embeding_layer`` (so spelled), start with a dropout, so their blocks
are ``hydra_mlp.{i}.{1 + 2 j}`` and their outputs ``hydra_lm_head.{i}.1``.

The numbers of heads and blocks come from the tensors. In the authors' program the blocks of a head
after the first share one weight: jspec reads such copies as one weight, and writes them again.
Drafter: ``jspec.drafters.hydra``.
"""

import dataclasses
import re

import numpy as np

from jspec.checkpoints.families import common
from jspec.checkpoints.families.names import Entry, block_table, blocks, matrix, vector
from jspec.checkpoints.heads import base
from jspec.checkpoints.heads.base import HeadFormat, Layout, Tensors
from jspec.models.decoder import DecoderConfig
from jspec.models.heads.hydra import HydraConfig, HydraParams, JoiningParams, PrefixParams
from jspec.models.heads.medusa import BlockParams
from jspec.util.messages import shown

_ARCHITECTURES = ("mlp", "prefix-mlp")  # two of the authors' four
_PREFIX = "prefix_embeding_layer"
# The file holds a copy of the target's embedding, and the prefix layer one that nothing reads.
_UNUSED = ("input_embed_fn.weight", f"{_PREFIX}.embed_tokens.weight")
_BLOCK = re.compile(r"hydra_mlp\.(\d+)\.(\d+)\.linear\.weight")


def check_architecture(raw: dict) -> None:
    """Raise ValueError if config.json names heads of the authors that are not supported."""
    stated = raw.get("hydra_head_arch")
    if stated not in (None, *_ARCHITECTURES):
        known = " and ".join(map(repr, _ARCHITECTURES))
        raise ValueError(f"hydra_head_arch={shown(stated)} is not supported, only {known}")


def _select(_: dict, tensors: Tensors, config: HydraConfig) -> Tensors:
    tensors = {name: tensor for name, tensor in tensors.items() if name not in _UNUSED}
    return base.without_repeats(_repeats(config), tensors)


def _read_config(raw: dict, tensors: Tensors, target: DecoderConfig, _: str) -> HydraConfig:
    check_architecture(raw)
    prefixed = any(name.startswith(f"{_PREFIX}.") for name in tensors)
    architecture = _ARCHITECTURES[prefixed]
    stated = raw.get("hydra_head_arch", architecture)
    if stated != architecture:
        other = f"the tensors are those of {architecture!r}"
        raise ValueError(f"hydra_head_arch is {shown(stated)}, but {other}")
    matches = [match for name in tensors if (match := _BLOCK.fullmatch(name))]
    num_heads, _ = common.counted([(match[1], "0") for match in matches], len(tensors))
    num_layers = len({match[2] for match in matches})
    base.check_width("heads", tensors[matches[0][0]].shape[:1], target)
    if not any(name.endswith(".res_connection.weight") for name in tensors):
        raise ValueError(
            "heads that do not read the drafted tokens (grounded_heads=False) are not supported; "
            "export them as Medusa heads"
        )
    offset = common.whole({"hidden_state_offset": 0} | raw, "hidden_state_offset", least=0)
    count = target.num_layers
    if offset > count:
        raise ValueError(f"hidden_state_offset is {offset}, but the target has {count} layers")
    config = HydraConfig(
        num_heads=num_heads,
        num_layers=num_layers,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        capture_layers=(count - offset,),
        output_bias=any(re.fullmatch(r"hydra_lm_head\.\d+\.(1\.)?bias", name) for name in tensors),
        network=network(target) if prefixed else None,
    )
    if num_layers < 3:
        return config
    tied = dataclasses.replace(config, tie_blocks=True)
    equal = (
        name in tensors and first in tensors and np.array_equal(tensors[name], tensors[first])
        for name, first in _repeats(tied).items()
    )
    return tied if all(equal) else config


def network(target: DecoderConfig) -> DecoderConfig:
    """Return the config of the prefix layer for a target: one block like its own."""
    return dataclasses.replace(target, layers=target.layers[:1])


def _repeats(config: HydraConfig) -> dict[str, str]:
    """Return the names of the copies of tied blocks, and their originals."""
    if not config.tie_blocks:
        return {}
    return {
        f"{_block(config, head, layer)}.linear.{kind}": f"{_block(config, head, 1)}.linear.{kind}"
        for head in range(config.num_heads)
        for layer in range(2, config.num_layers)
        for kind in ("weight", "bias")
    }


def _block(config: HydraConfig, head: int, layer: int) -> str:
    return f"hydra_mlp.{head}.{layer if config.network is None else 1 + 2 * layer}"


def _table(config: HydraConfig) -> tuple[Entry, ...]:
    size, vocab, entries = config.hidden_size, config.vocab_size, []

    def affine(path: tuple, fields: tuple[str, str], name: str, inputs: int) -> None:
        entries.append(matrix((*path, fields[0]), f"{name}.weight", size, inputs))
        entries.append(vector((*path, fields[1]), f"{name}.bias", size))

    for head in range(config.num_heads):
        first, path, inputs = _block(config, head, 0), ("joining", head), (2 + head) * size
        affine(path, ("weight", "bias"), f"{first}.linear", inputs)
        affine(path, ("residual", "residual_bias"), f"{first}.res_connection", inputs)
        for layer in range(1, config.separate_blocks):
            name = f"{_block(config, head, layer)}.linear"
            affine(("blocks", head, layer - 1), ("weight", "bias"), name, size)
        name = f"hydra_lm_head.{head}" + ".1" * (config.network is not None)
        entries.append(matrix(("outputs", head), f"{name}.weight", vocab, size))
        if config.output_bias:
            entries.append(vector(("output_biases", head), f"{name}.bias", vocab))
    if config.network is not None:
        entries += [
            dataclasses.replace(entry, path=("prefix", *entry.path))
            for entry in block_table(config.network, 0, f"{_PREFIX}.layers.0")
        ]
        entries.append(vector(("prefix", "norm"), f"{_PREFIX}.norm.weight", size))
    return tuple(entries)


def _assemble(config: HydraConfig, nested: dict, _: None) -> HydraParams:
    later, prefix = nested.get("blocks", {}), nested.get("prefix")
    if prefix is not None:
        prefix = PrefixParams(layers=blocks(prefix, config.network), **prefix)
    return HydraParams(
        joining=tuple(JoiningParams(**fields) for fields in base.by_index(nested["joining"])),
        blocks=tuple(
            tuple(BlockParams(**fields) for fields in base.by_index(later.get(head, {})))
            for head in sorted(nested["joining"])
        ),
        outputs=base.by_index(nested["outputs"]),
        output_biases=base.by_index(nested.get("output_biases", {})),
        prefix=prefix,
    )


def _describe(config: HydraConfig, target: DecoderConfig, target_name: str) -> dict:
    """Return a config.json that the authors' loader reads."""
    prefix = config.network
    machine = ("cache_dtype", "activation_dtype", "attention")
    other = prefix is not None and prefix != dataclasses.replace(
        network(target), **{key: vars(prefix)[key] for key in machine}
    )
    features = {"a prefix layer unlike the target's blocks": other}
    base.refuse("hydra", features, "train one like them")
    return {
        "hydra_num_heads": config.num_heads,
        "hydra_num_layers": config.num_layers,
        "hydra_head_arch": _ARCHITECTURES[config.network is not None],
        "grounded_heads": True,
        "hidden_state_offset": target.num_layers - config.capture_layers[0],
        "base_model_name_or_path": target_name,
    }


def _extra(config: HydraConfig, params: HydraParams, dtype: np.dtype) -> dict[str, np.ndarray]:
    return base.copies(_repeats(config), _table(config), params, dtype)


_FILE = "hydra_lm_head.pt"
_LAYOUT = Layout("hydra", _table, _describe, _extra, torch_file=_FILE, names_target=True)
FORMAT = HeadFormat(
    title="Hydra",
    kinds=("hydra",),
    owns=lambda config: isinstance(config, HydraConfig),
    layouts=(_LAYOUT,),
    sniff=base.by_names("hydra", {"hydra": _BLOCK}),
    read_config=_read_config,
    assemble=_assemble,
    select=_select,
)
