"""Instructions of launches: compile time grows with them, so they are pinned."""

import pathlib

import jax
import jax.numpy as jnp
import pytest

import jspec
from jspec.api import config
from jspec.api.build import build_plan
from jspec.core.types import Params
from jspec.drafters import NGram, NoDrafter
from jspec.engine.plan import Plan
from jspec.engine.profile import Profile
from jspec.models import decoder
from tests import networks, program_size

MODELS = pathlib.Path(jspec.__file__).parent / "assets" / "demo"
HEAD = {"method": "eagle3", "model": str(MODELS / "eagle3"), "num_speculative_tokens": 4}
TREE = HEAD | {"num_speculative_tokens": 5, "tree_size": 16}
METHODS = {
    "plain": None,
    "ngram": {
        "method": "ngram",
        "num_speculative_tokens": 4,
        "prompt_lookup_max": 3,
        "prompt_lookup_min": 1,
    },
    "suffix": {"method": "suffix"},
    "draft_model": HEAD | {"method": "draft_model", "model": str(MODELS / "draft")},
    "eagle": HEAD | {"method": "eagle", "model": str(MODELS / "eagle1")},
    "eagle3": HEAD,
    "eagle3, dynamic tree": TREE | {"tree": "eagle2"},
    "eagle3, drawn tree": TREE | {"tree": "sampled"},
}
# Lines of StableHLO and of HLO of launches of eight rows.
EXPECTED = {
    "plain": {"greedy": (2469, 5999), "sampled": (2931, 6593)},
    "ngram": {"greedy": (4644, 12723), "sampled": (5107, 13436)},
    "suffix": {"greedy": (8635, 19401), "sampled": (9098, 20102)},
    "draft_model": {"greedy": (6024, 14071), "sampled": (8104, 18027)},
    "eagle": {"greedy": (5508, 12432), "sampled": (7597, 16290)},
    "eagle3": {"greedy": (5648, 12756), "sampled": (7737, 16620)},
    "eagle3, dynamic tree": {"greedy": (7177, 16409), "sampled": (7633, 17096)},
    "eagle3, drawn tree": {"greedy": (8118, 18042), "sampled": (11929, 24857)},
}
LARGE_EXPECTED = {"plain": (6972, 19804), "ngram": (13287, 43014)}
PROFILES = {"greedy": Profile(), "sampled": Profile(filters=("temperature", "top_p"))}

# SmolLM2's sizes. A launch needs no weights to be lowered.
LARGE = networks.build(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    max_positions=2048,
    tie_embeddings=True,
    cache_dtype="bfloat16",
    activation_dtype="bfloat16",
)


def embedded(method):
    """Return plan and weights of a method with the embedded model."""
    build = build_plan(str(MODELS / "target"), config.read(METHODS[method]))
    return build.plan, build.params


def large(method):
    """Return the plan of a method with a model of thirty layers, and the shapes of its weights."""
    drafter = NGram(4, 1, 3) if method == "ngram" else NoDrafter()
    plan = Plan(decoder.Decoder(LARGE), drafter, packed=True)
    return plan, Params(
        jax.eval_shape(lambda: decoder.init_params(jax.random.key(0), LARGE, dtype=jnp.bfloat16)),
        None,
    )


def check(measured, expected):
    """Compare counts with those of this JAX, and leave a margin for small changes."""
    margin = 1.05 if jax.__version__.startswith("0.10.") else 1.25
    assert all(one <= margin * other for one, other in zip(measured, expected, strict=False))


@pytest.mark.parametrize("method", ["plain", "ngram", "eagle3"])
def test_a_launch_is_lowered_to_few_instructions(method):
    lowered = program_size.lowered(*embedded(method), Profile())
    check([lowered.as_text().count("\n")], EXPECTED[method]["greedy"])


@pytest.mark.parametrize("method", LARGE_EXPECTED)
def test_a_launch_of_thirty_layers_is_lowered_to_few_instructions(method):
    lowered = program_size.lowered(*large(method), Profile())
    check([lowered.as_text().count("\n")], LARGE_EXPECTED[method])


@pytest.mark.slow
@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("method", METHODS)
def test_a_launch_is_compiled_to_few_instructions(method, profile):
    lowered = program_size.lowered(*embedded(method), PROFILES[profile])
    check(program_size.size_of(lowered), EXPECTED[method][profile])


@pytest.mark.slow
@pytest.mark.parametrize("method", LARGE_EXPECTED)
def test_a_launch_of_thirty_layers_is_compiled_to_few_instructions(method):
    lowered = program_size.lowered(*large(method), Profile())
    check(program_size.size_of(lowered), LARGE_EXPECTED[method])


def test_an_accelerator_compiles_one_pass_for_few_nodes():
    plan, params = large("ngram")
    settings = {"passes by size": {"packed": True}, "one pass": {"node_buckets": (5,)}}
    texts = {
        name: program_size.lowered(
            Plan(plan.target, plan.drafter, platform="tpu", **options), params, Profile()
        ).as_text()
        for name, options in settings.items()
    }
    assert texts["passes by size"] == texts["one pass"]
