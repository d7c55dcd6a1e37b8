"""Rotary scalings between Hugging Face's config.json and ``RopeConfig``.

There are two spellings: ``rope_theta`` and ``rope_scaling`` beside the sizes (transformers up to
4), and one ``rope_parameters`` with both (5 and later). Files may have either or both.
"""

import math

from jspec.models.blocks.rope import KINDS, RopeConfig
from jspec.util.messages import shown
from jspec.util.values import INT32, is_real

_ORIGINAL = "original_max_position_embeddings"
# The required and the optional keys of each kind, besides its name and theta.
_REQUIRED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}
_YARN = ("beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim")
MSCALES = ("short_mscale", "long_mscale")  # PhiMoE's names of the attention_factor of longrope
_OPTIONAL = {
    "llama3": (_ORIGINAL,),
    "proportional": ("factor",),
    "yarn": ("factor", _ORIGINAL, *_YARN),
    "longrope": ("factor", _ORIGINAL, "attention_factor", *MSCALES),
}
# Positions of images: a token of a text has the same position on all axes.
_OF_IMAGES = ("mrope_section", "mrope_interleaved")
# Keys that transformers does not read, and the values that have no effect elsewhere.
_UNREAD = {"finetuned": (True, False), "attn_factor": (1,), "extrapolation_factor": (1,)}
_ALIASES = {"su": "longrope"}  # the first name, of Phi-3
_DEFAULT_THETA = 10000.0


def read(raw: dict, rotary_dim: int) -> tuple[RopeConfig, int]:
    """Return the scaling of a config.json, and the longest sequence that it supports.

    ``rotary_dim`` is the number of rotated features of a head.
    """
    rope, positions = _read(raw, rotary_dim)
    if positions >= INT32:
        raise ValueError(
            f"max_position_embeddings and the rotary scaling make {shown(positions)} positions, "
            f"more than {INT32 - 1}"
        )
    return rope, positions


def _read(raw: dict, rotary_dim: int) -> tuple[RopeConfig, int]:
    trained = raw["max_position_embeddings"]
    given = merged(raw)
    share = given.pop("partial_rotary_factor", None)
    for key in _OF_IMAGES:
        given.pop(key, None)
    kind = given.pop("rope_type")
    kind = _ALIASES.get(kind, kind) if isinstance(kind, str) else kind
    for key in [key for key, values in _UNREAD.items() if given.get(key) in values]:
        del given[key]
    theta = positive("rope_theta", given.pop("rope_theta"))
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"rope_type {shown(kind)} is not supported; known: {', '.join(KINDS)}")
    _check_keys(kind, given)
    original = raw.get(_ORIGINAL)  # as in Phi-3; it has precedence
    original = given.get(_ORIGINAL, trained) if original is None else original
    if type(original) is not int or original < 2:
        raise ValueError(f"{_ORIGINAL} must be a whole number of tokens, got {shown(original)}")
    if kind in ("default", "linear", "dynamic"):
        factor = float(given.get("factor", 1.0))
        length = trained if kind == "dynamic" else 0
        return RopeConfig(theta, kind, factor, length), int(trained * factor)
    if kind == "proportional":
        share = positive("partial_rotary_factor", 1 if share is None else share)
        return RopeConfig(theta, kind, float(given.get("factor", 1.0)), share=share), trained
    factor = float(given.get("factor") or trained / original)
    if kind == "llama3":
        low, high = given["low_freq_factor"], given["high_freq_factor"]
        return RopeConfig(theta, kind, factor, original, float(low), float(high)), trained
    if kind == "yarn":
        rope = RopeConfig(
            theta,
            kind,
            factor,
            original,
            beta_fast=float(given.get("beta_fast", 32)),
            beta_slow=float(given.get("beta_slow", 1)),
            truncate=given.get("truncate", True),
            amplitude=_yarn_amplitude(given, factor),
        )
        return rope, max(trained, int(original * factor))
    return _longrope(given, theta, factor, original, rotary_dim), trained


def write(rope: RopeConfig, max_positions: int) -> dict:
    """Return the inverse of ``read``, in both spellings."""
    scaling: dict = {"rope_type": rope.kind}
    stretched = rope.kind in ("linear", "dynamic")
    trained = round(max_positions / rope.factor) if stretched else max_positions
    if rope.kind != "default":
        scaling["factor"] = rope.factor
    if rope.kind in ("llama3", "yarn", "longrope"):
        scaling[_ORIGINAL] = rope.original_length
    if rope.kind == "proportional":
        scaling["partial_rotary_factor"] = rope.share
    if rope.kind == "llama3":
        low, high = rope.low_freq_factor, rope.high_freq_factor
        scaling |= {"low_freq_factor": low, "high_freq_factor": high}
    if rope.kind == "yarn":
        scaling |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow}
        scaling["truncate"] = rope.truncate
    if rope.kind == "longrope":
        short, long = list(rope.short_factors), list(rope.long_factors)
        scaling |= {"short_factor": short, "long_factor": long}
    if rope.kind in ("yarn", "longrope"):
        scaling["attention_factor"] = rope.amplitude
    return {
        "max_position_embeddings": trained,
        "rope_theta": rope.theta,
        "rope_scaling": None if rope.kind == "default" else scaling,
        "rope_parameters": {**scaling, "rope_theta": rope.theta},
    }


def of_kind(raw: dict, kind: str, theta: str = "rope_theta") -> dict:
    """Return a config.json with the rotary keys of one kind of layers in place of those of all.

    ``theta`` is the old key of that kind. In that spelling only full attention has a scaling.
    """
    given = raw.get("rope_parameters")
    if isinstance(given, dict) and any(isinstance(value, dict) for value in given.values()):
        inner = given.get(kind) or {}
        both = {"rope_parameters": inner, "rope_scaling": None}
        known = isinstance(inner, dict) and inner.get("rope_theta") is not None
        return raw | both | {"rope_theta": None if known else raw.get(theta)}
    scaling = raw.get("rope_scaling") if kind == "full_attention" else None
    return raw | {"rope_scaling": scaling, "rope_theta": raw.get(theta)}


def with_default(raw: dict, rope: dict) -> dict:
    """Return a config.json with ``rope`` as its rotary parameters, if it states none."""
    stated = raw.get("rope_scaling") or raw.get("rope_parameters")
    return raw if stated else raw | {"rope_parameters": rope}


def merged(raw: dict) -> dict:
    """Return the rotary keys of both spellings in one dict, with rope_type and rope_theta set."""
    keys: dict = {}
    top = {"rope_theta": raw.get("rope_theta")}
    for part in (top, raw.get("rope_scaling") or {}, raw.get("rope_parameters") or {}):
        if not isinstance(part, dict) or any(isinstance(value, dict) for value in part.values()):
            raise ValueError(f"rotary parameters by layer type are not supported: {shown(part)}")
        for key, value in part.items():
            key = "rope_type" if key == "type" else key  # the name before transformers 4.43
            if value is not None and keys.setdefault(key, value) != value:
                raise ValueError(
                    f"{key} is given as {shown(keys[key])} and as {shown(value)} in rope_theta, "
                    "rope_scaling and rope_parameters; keep one of them"
                )
    keys.setdefault("rope_type", "default")
    keys.setdefault("rope_theta", raw.get("default_theta", _DEFAULT_THETA))
    if keys["rope_type"] == "default" and keys.get("factor") == 1:
        del keys["factor"]
    return keys


def _check_keys(kind: str, given: dict) -> None:
    """Check that required keys are present, no others are, and numbers are positive."""
    required = _REQUIRED.get(kind, ())
    known = (*required, *_OPTIONAL.get(kind, ()))
    missing = [key for key in required if key not in given]
    unknown = [key for key in given if key not in known]
    if missing or unknown:
        raise ValueError(
            f"rope_type {kind!r} takes {', '.join(known) or 'nothing more'}; missing: "
            f"{', '.join(missing) or 'none'}; not understood: "
            f"{shown(unknown)[1:-1] if unknown else 'none'}"
        )
    for key, value in given.items():
        if key in ("short_factor", "long_factor"):
            for number in value if isinstance(value, list) else [value]:
                positive(key, number)
        elif key == "truncate" and not isinstance(value, bool):
            raise ValueError(f"truncate must be true or false, got {shown(value)}")
        elif key != "truncate":
            positive(key, value)


def positive(key: str, value: object) -> float:
    """Return ``value`` as a float; raise ValueError if it is not a positive number."""
    if not is_real(value) or value <= 0:
        raise ValueError(f"{key} must be a positive number, got {shown(value)}")
    return float(value)


def _yarn_amplitude(given: dict, factor: float) -> float:
    def growth(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if "attention_factor" in given:
        return float(given["attention_factor"])
    if "mscale" in given and "mscale_all_dim" in given:
        return growth(given["mscale"]) / growth(given["mscale_all_dim"])
    return growth(1.0)


def _longrope(given: dict, theta: float, factor: float, original: int, head_dim: int) -> RopeConfig:
    for key in ("short_factor", "long_factor"):
        if not isinstance(given[key], list) or len(given[key]) != head_dim // 2:
            raise ValueError(f"{key} must be a list of {head_dim // 2} numbers (head_dim / 2)")
    amplitudes = [given[key] for key in ("attention_factor", *MSCALES) if key in given]
    if len(set(amplitudes)) > 1:
        raise ValueError(f"{' and '.join(MSCALES)} must be equal, got {shown(amplitudes)}")
    amplitude = amplitudes[0] if amplitudes else None
    if amplitude is None:
        amplitude = math.sqrt(1 + math.log(max(factor, 1)) / math.log(original))
    return RopeConfig(
        theta,
        "longrope",
        factor,
        original,
        amplitude=float(amplitude),
        short_factors=tuple(map(float, given["short_factor"])),
        long_factors=tuple(map(float, given["long_factor"])),
    )
