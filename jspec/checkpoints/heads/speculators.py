"""The parts of config.json that the speculators library writes for every kind of head."""

from jspec.checkpoints import families
from jspec.models.decoder import DecoderConfig
from jspec.util.messages import shown

KEY = "speculators_model_type"


def network_config(raw: dict, known: tuple[str, ...]) -> dict:
    """Return ``transformer_layer_config``.

    Raises:
      ValueError: it is no object, or the type of the head is not one of ``known``.
    """
    if raw[KEY] not in known:
        names = ", ".join(map(repr, known))
        raise ValueError(f"{KEY} {shown(raw[KEY])} is not supported; known: {names}")
    inner = raw.get("transformer_layer_config")
    if not isinstance(inner, dict):
        raise ValueError(f"transformer_layer_config must be an object, got {shown(inner)}")
    return inner


def describe(
    kind: str, inner: dict, num_tokens: int, target: DecoderConfig, target_name: str
) -> dict:
    """Return the keys for a head of type ``kind`` that drafts ``num_tokens``."""
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": num_tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    verifier = {
        "name_or_path": target_name,
        "architectures": families.describe(target)["architectures"],
    }
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
