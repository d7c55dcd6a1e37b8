"""The hidden states of the target that an EAGLE-3 head reads, in config.json.

``eagle_aux_hidden_state_layer_ids`` at the top of config.json holds indices into ``hidden_states``.
Inside ``eagle_config``, a list that begins with 1 counts outputs of layers, one less. A list that
begins with 2 counts hidden states (SGLang's rule). Other lists are ambiguous and raise. Without a
list the head reads hidden states 2, n // 2 and n - 3 of n layers.
"""

from typing import Any

from jspec.checkpoints.heads import base
from jspec.util.messages import shown

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


def default_capture_layers(num_layers: int) -> tuple[int, ...]:
    """Return the hidden states that EAGLE-3 reads of a target with ``num_layers`` layers."""
    return (2, num_layers // 2, num_layers - 3)


def read(raw: dict, nested: dict, num_layers: int) -> tuple[int, ...]:
    """Return indices into ``hidden_states``, from config.json and its ``eagle_config``."""
    top, inside = (_ids(source) for source in (raw, nested))
    if inside is None:
        layers = default_capture_layers(num_layers) if top is None else top
    elif top is not None and top in (inside, _after(inside)):
        layers = top
    elif top is not None or inside[0] not in (1, 2):
        other = "" if top is None else f", and {list(top)} at the top of config.json fits neither"
        raise ValueError(
            f"eagle_config.{LAYER_IDS} {list(inside)} may count hidden states or outputs of layers"
            f"{other}; state them as indices into hidden_states, in {LAYER_IDS} at the top alone"
        )
    else:
        layers = _after(inside) if inside[0] == 1 else inside
    count = raw.get("num_aux_hidden_states")
    if count not in (None, len(layers)):
        raise ValueError(f"num_aux_hidden_states is {count}, but {LAYER_IDS} are {list(layers)}")
    base.check_layers(layers, num_layers, LAYER_IDS)
    return layers


def _ids(source: dict) -> tuple[int, ...] | None:
    ids = source.get(LAYER_IDS) or None
    if ids is not None and (not isinstance(ids, list) or any(type(i) is not int for i in ids)):
        raise ValueError(f"{LAYER_IDS} must be a list of whole numbers, got {shown(ids)}")
    return ids and tuple(ids)


def _after(ids: tuple[int, ...]) -> tuple[int, ...]:
    """Return the hidden states that are the outputs of layers ``ids``."""
    return tuple(i + 1 for i in ids)


def describe(layers: tuple[int, ...], num_layers: int) -> dict:
    """Return the keys for hidden states other than the default, as vLLM and SGLang count them."""
    if layers == default_capture_layers(num_layers):
        return {}
    keys: dict[str, Any] = {LAYER_IDS: list(layers)}
    if layers[0] == 2:
        keys["eagle_config"] = {LAYER_IDS: [layer - 1 for layer in layers]}
    elif layers[0] > 2:
        keys["eagle_config"] = {LAYER_IDS: list(layers)}
    return keys
