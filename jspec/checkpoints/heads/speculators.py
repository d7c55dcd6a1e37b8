"""The parts of config.json that the speculators library writes for every kind of head."""

from typing import Any

from jspec.checkpoints import families
from jspec.models.decoder import DecoderConfig
from jspec.util.messages import shown

KEY = "speculators_model_type"


def network_config(raw: dict, known: tuple[str, ...]) -> dict:
    """Return ``transformer_layer_config``."""
    if raw[KEY] not in known:
        names = ", ".join(map(repr, known))
        raise ValueError(f"{KEY} {shown(raw[KEY])} is not supported; known: {names}")
    inner = raw.get("transformer_layer_config")
    if not isinstance(inner, dict):
        raise ValueError(f"transformer_layer_config must be an object, got {shown(inner)}")
    return inner


def features(config: Any) -> dict[str, bool]:
    """Return the features of a head that these files cannot express; see ``base.refuse``."""
    return {
        "a head without an output matrix": not config.separate_head,
        "a target of another width": config.target_hidden_size != config.hidden_size,
    }


def check_embedding(layout: str, config: Any) -> None:
    """Raise ValueError if a head has no embedding, which the layout requires."""
    if not config.separate_embedding:
        raise ValueError(f"layout={layout!r} needs an embedding; pass the target's as embedding")


def describe(kind: str, inner: dict, tokens: int, target: DecoderConfig, target_name: str) -> dict:
    """Return the keys for a head of type ``kind`` that drafts ``tokens``."""
    proposal = {"proposal_type": "greedy", "speculative_tokens": tokens}
    proposal |= {"verifier_accept_k": 1, "accept_tolerance": 0.0}
    architectures = families.describe(target)["architectures"]
    verifier = {"name_or_path": target_name, "architectures": architectures}
    return {
        KEY: kind,
        "speculators_version": "0.9.0",  # the version of this schema
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": verifier,
        },
        "transformer_layer_config": inner,
        "tie_word_embeddings": False,
    }
