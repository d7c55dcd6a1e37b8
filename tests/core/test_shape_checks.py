"""Tests of the checks of custom drafters, targets and rules: errors name the faulty array."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec.core import trees
from jspec.models.decoder import Decoder
from jspec.verify import RULES
from tests import tiny
from tests.core.test_validation import EAGLE, WEIGHTS, generate, refused
from tests.drafters import heads

# --- Drafters -----------------------------------------------------------------------------------


def _draft(size=5, batch=1, depth=4, **changed):
    draft = jspec.Draft(
        jnp.zeros((batch, size), jnp.int32),
        trees.chain(size - 1),
        jnp.ones((batch, size), bool),
        max_depth=depth,
    )
    return draft.replace(**changed)


@dataclasses.dataclass(frozen=True)
class Custom(jspec.NoDrafter):
    """A drafter of 4 tokens whose ``propose`` and ``update`` a test replaces."""

    proposed: Callable = lambda memory: (_draft(), memory)
    updated: Callable = lambda memory, shared: (memory, shared)

    max_depth: int = 4

    tree_size = 5

    def init(self, params, request, capacity):
        return {"seen": jnp.zeros(1, jnp.int32)}

    def propose(self, params, request, shared, memory, history):
        return self.proposed(memory)

    def update(self, round):
        return self.updated(round.memory, round.shared)


DRAFTS = {
    "no root": (_draft(4), ["tokens of int32[1, 4] in place of int32[1, 5]", "root included"]),
    "no batch": (_draft(tokens=jnp.zeros(5, jnp.int32)), ["tokens of int32[5]", "B=1 rows"]),
    "floats": (_draft(tokens=jnp.zeros((1, 5))), ["tokens of float32[1, 5]", "int32[1, 5]"]),
    "valid of the row": (_draft(valid=jnp.ones(5, bool)), ["valid of bool[5]", "bool[1, 5]"]),
    "valid as numbers": (_draft(valid=jnp.ones((1, 5))), ["valid of float32[1, 5]"]),
    "few parents": (_draft(parents=np.array([-1, 0])), ["parents of int", "int32[5]"]),
    "parents behind": (
        _draft(parents=np.array([-1, 2, 0, 2, 3], np.int32)),
        ["parents=[-1, 2, 0, 2, 3]", "node 1 does not follow its parent"],
    ),
    "narrow logits": (_draft(logits=jnp.zeros((1, 5, 8))), ["logits of float32[1, 5, 8]", "64]"]),
    "flat logits": (_draft(logits=jnp.zeros(64)), ["logits of float32[64]", "[1, 5, 64]"]),
    "drawn at no node": (_draft(sampled=jnp.ones(5, bool)), ["sampled of bool[5]"]),
    "distributions of deterministic nodes": (
        _draft(logits=jnp.zeros((1, 5, 64))),
        ["recorded logits", "proposal='deterministic', by which", "proposal = 'chain'"],
    ),
    "drawn without logits": (
        _draft(sampled=jnp.ones((1, 5), bool)),
        ["sampled", "gives no logits"],
    ),
    "parents listed": (_draft(parents=[-1, 0, 1, 2, 3]), ["parents as a list", "NumPy array [N]"]),
    "parents of the device": (
        _draft(parents=jnp.arange(-1, 4)),
        [
            "gave parents as ",
            "give a static NumPy array [N] for all rows, as from jspec.core.trees.chain",
        ],
    ),
    "another depth": (_draft(depth=3), ["max_depth=3", "the drafter has max_depth=4"]),
}


@pytest.mark.parametrize("mistake", DRAFTS)
def test_errors_name_the_misshapen_array_of_a_draft(mistake):
    draft, words = DRAFTS[mistake]
    refused("Custom.propose", *words, drafter=Custom(lambda memory: (draft, memory)))


def test_a_draft_deeper_than_max_depth_raises():
    shallow = Custom(lambda memory: (_draft(depth=3), memory), max_depth=3)
    refused("parents=[-1, 0, 1, 2, 3], 4 deep, but the drafter has max_depth=3", drafter=shallow)


@pytest.mark.parametrize("result", [None, _draft(), (jnp.zeros((1, 5)), ()), (_draft(), (), ())])
def test_propose_must_return_a_draft_and_a_memory(result):
    refused(
        "Custom.propose must return (jspec.Draft, memory), not ", drafter=Custom(lambda _: result)
    )


MEMORIES = {
    "another shape": ({"seen": jnp.zeros(2, jnp.int32)}, "memory['seen'] of int32[2], but began"),
    "another dtype": ({"seen": jnp.zeros(1)}, "memory['seen'] of float32[1], but began with mem"),
    "another name": ({"met": jnp.zeros(1, jnp.int32)}, "memory['met'], but began with memory['s"),
    "another container": ({"seen": jnp.zeros(1, jnp.int32), "met": ()}, "'met': ()"),
    "no memory": ((), "a round of Custom ends with nothing, but began with memory['seen']"),
}


@pytest.mark.parametrize("mistake", MEMORIES)
def test_a_memory_that_changes_shape_dtype_or_structure_raises(mistake):
    memory, words = MEMORIES[mistake]
    refused(words, drafter=Custom(lambda _: (_draft(), memory)))
    refused(words, drafter=Custom(updated=lambda _, shared: (memory, shared)))


@dataclasses.dataclass(frozen=True)
class Prefilling(Custom):
    """A drafter whose ``prefill`` a test replaces."""

    prefilled: Callable = lambda memory: memory

    def prefill(self, params, memory, tokens, features, start, valid):
        return self.prefilled(memory)


@pytest.mark.parametrize(
    ("prefilled", "words"),
    [
        (lambda _: None, "Prefilling.prefill ends with nothing, but began with memory['seen']; pr"),
        (lambda memory: {"seen": memory["seen"] + 0.5}, "ends with memory['seen'] of float32[1]"),
        (
            lambda memory: [memory["seen"]],
            "prefill must return the structure, shapes and dtypes that init",
        ),
    ],
)
def test_a_prefill_that_changes_the_memory_structure_raises(prefilled, words):
    refused(words, drafter=Prefilling(prefilled=prefilled))


@pytest.mark.parametrize("parents", [[-1, 0, 1, 2, 3], [-1, 0, 1, 4, 3]])
def test_dynamic_trees_drop_nodes_that_are_too_deep_or_detached(parents):
    plain = generate(max_new_tokens=12)[0].tokens
    repeated = jnp.full((1, 5), plain[1])  # the text repeats it, so most nodes are accepted
    draft = _draft(tokens=repeated, parents=jnp.array([parents]), depth=2)
    drafter = Custom(lambda memory: (draft, memory), max_depth=2)
    answer = generate(drafter=drafter, max_new_tokens=12)[0]
    assert answer.tokens.tolist() == plain.tolist()
    assert 0 < answer.drafted <= 2 * answer.rounds


def test_drawn_nodes_need_their_distributions_outside_of_a_round_too():
    draft = _draft(sampled=jnp.ones((1, 5), bool))
    with pytest.raises(ValueError, match="must record its distributions; give `logits`"):
        _ = draft.drawn


def test_update_must_return_memory_and_shared():
    memory_alone = Custom(updated=lambda memory, _: memory)
    refused("Custom.update must return (memory, shared), not a dict", drafter=memory_alone)
    sharing = Custom(updated=lambda memory, _: (memory, jnp.zeros(1)))
    refused("ends with memory['seen'], shared, but began with memory['seen'];", drafter=sharing)


# --- Targets ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Wrong(Decoder):
    """The tiny target with an output that a test changes."""

    changed: Callable = lambda out: out

    def forward(self, *arguments):
        return self.changed(super().forward(*arguments))


@pytest.mark.parametrize(
    ("changed", "drafter", "words"),
    [
        (lambda out: out.logits, tiny.NONE, ["Wrong.forward must return a jspec.core.types.T"]),
        (
            lambda out: out.replace(logits=out.logits[:, -1]),
            tiny.NONE,
            ["Wrong.forward gave logits of float32[1, 64] in place of float32[1, 16, 64]"],
        ),
        (
            lambda out: out.replace(features=()),
            EAGLE,
            ["Wrong.forward gave 0 features", "capture_layers=(2,): one [B, N, D] of each"],
        ),
        (
            lambda out: out.replace(features=tuple(x[:, 0] for x in out.features)),
            EAGLE,
            ["Wrong.forward gave features[0] of float32[1, 32] in place of float32[1, 16, 32]"],
        ),
        (
            lambda out: out.replace(tree_kv=jax.tree.map(lambda x: x[:, :, -1:], out.tree_kv)),
            tiny.NONE,
            ["gave tree_kv[0].k of shape [1, 2, 1, 8] in place of [1, 2, 16, 8]", "N=16 nodes"],
        ),
        (
            lambda out: out.replace(tree_kv=out.tree_kv[:1]),
            tiny.NONE,
            ["gave tree_kv=(AttentionKV) for a cache of layers=(AttentionKV, AttentionKV)"],
        ),
    ],
)
def test_errors_name_the_faulty_output_of_a_target(changed, drafter, words):
    target = Wrong(tiny.TARGET.config, changed)
    weights = None if drafter is tiny.NONE else heads.random_params("eagle")
    refused(*words, target=target, drafter=drafter, drafter_params=weights)


def test_hidden_states_beyond_the_layers_of_the_target_raise():
    @dataclasses.dataclass(frozen=True)
    class Deep(Custom):
        capture_layers = (0, 9)

    refused("capture_layers=(0, 9) must be at most 2, the layers of the target", drafter=Deep())


# --- Rules --------------------------------------------------------------------------------------


def ruled(name, walk, **changes):
    return dataclasses.replace(RULES[name], name="mine", walk=walk, **changes)


def likeliest(distribution, draft, tree, _, proposal):
    """Walk like ``match``, but return next_logits of all nodes by mistake."""
    draws = distribution.argmax(-1).astype(jnp.int32)
    return *RULES["match"].walk(distribution, draft, tree, draws, proposal)[:2], distribution


@dataclasses.dataclass
class Listed:
    """A walk that is not hashable, because a setting is a list."""

    setting: list

    def __call__(self, *given):
        return likeliest(*given)


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (likeliest, ["rule=<function likeliest", "jspec.verify.Rule", "what it is exact for"]),
        (3, ["rule=3 must be a name in jspec.RULES"]),
        (
            ruled("match", Listed([]), exact_for=frozenset({"chain"})),
            ["rule=Rule must be hashable", "frozen"],
        ),
        (
            ruled("match", lambda *given: given[0]),
            ["the walk of rule 'mine' must return (path, num_accepted, next_logits), not "],
        ),
        (
            ruled("match", lambda *given: (given[3], given[3][:, 0] > 0, None)),
            ["the walk of rule 'mine' gave num_accepted of bool[1] in place of int32[1]"],
        ),
        (
            ruled("match", lambda *given: (given[3][0], given[3][:, 0], None)),
            ["gave path of int32[1] in place of int32[1, 1]"],
        ),
        (
            ruled("rejection", likeliest),
            ["gave next_logits of float32[1, 1, 64] in place of float32[1, 64]"],
        ),
    ],
)
def test_errors_name_the_faulty_part_of_a_rule(rule, words):
    drafting = dict(drafter=tiny.DRAFT, drafter_params=WEIGHTS.drafter, temperature=0.8)
    refused(*words, rule=rule, **drafting)


def test_a_correct_custom_drafter_gives_the_text_of_plain_decoding():
    drafted, plain = generate(drafter=Custom())[0], generate()[0]
    assert drafted.tokens.tolist() == plain.tokens.tolist() and drafted.drafted > 0
