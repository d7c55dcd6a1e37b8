"""The rules through the interpreted kernel: exact distributions by enumeration, mistakes caught.

The kernel computes in float32; the enumeration sums its results in float64.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.kernels.rejection_sampling import acceptance, distributions, traversal
from jspec.tools.certify.conditionals import context_dependent
from jspec.tools.certify.drawing import Case
from jspec.tools.certify.enumeration import outcome
from jspec.tools.certify.kernels import KernelWalk
from tests.verify.cases import chain

EXACT, CAUGHT = 1e-6, 1e-4  # Rounding of float32, and the least error of a mistake.
DEPTH, V = 2, 3
UNEVEN = (-1, 0, 0, 1, 1)
_MIXED = ("without_replacement", "deterministic", "top_plus_one", *["deterministic"] * 4)


def first_node_only(drafted):
    return np.broadcast_to(np.arange(DEPTH) < 1, drafted.shape)


def tree(kind):
    target, drafter = context_dependent(32, V, DEPTH + 1), context_dependent(132, V, DEPTH)
    return Case(UNEVEN, kind, target, drafter)


TARGET, DRAFT = context_dependent(0, V, DEPTH + 1), context_dependent(1, V, DEPTH)
CASES = {
    "a chain": chain(TARGET, DRAFT),
    "a chain that may end early": chain(TARGET, DRAFT, keep=first_node_only),
    "siblings drawn without replacement": tree("without_replacement"),
    "the likeliest child and a drawn one": tree("top_plus_one"),
    "drawn and deterministic nodes": tree(_MIXED),
}


def by_kernel(rule):
    """Return the walk of a rule as the interpreted kernel judges trees of two children."""
    return KernelWalk(rule, "pallas_tpu_interpreted", max_children=2)


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_rule_through_the_kernel_has_the_distribution_of_the_target(case, rule):
    assert outcome(by_kernel(rule), case).distance < EXACT


def changing(change):
    """Return ``weights`` with every refusal changed."""
    original = distributions.weights

    def weights(x, y, token, target, draft, refusals=()):
        return original(x, y, token, target, draft, [change(each) for each in refusals])

    return weights


MISTAKES = {
    "the residual lacks the subtraction": lambda refusal: refusal._replace(share=0 * refusal.share),
    "the residual subtracts half of q": lambda refusal: refusal._replace(share=refusal.share / 2),
    "refused siblings stay in q": lambda refusal: refusal._replace(
        dropped=jnp.full_like(refusal.dropped, -1)
    ),
}


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_weights_of_the_kernel_is_caught(mistake, rule, monkeypatch):
    weights = changing(MISTAKES[mistake])
    for module in (distributions, acceptance, traversal):
        monkeypatch.setattr(module, "weights", weights)
    jax.clear_caches()  # Pallas keeps traced kernels.
    case = CASES["siblings drawn without replacement" if "siblings" in mistake else "a chain"]
    assert outcome(by_kernel(rule), case).distance > CAUGHT
    jax.clear_caches()


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_kernel_that_accepts_leniently_is_caught(rule):
    judge = by_kernel(rule)

    def lenient(processed, draft, tree, uniforms, proposal):
        return judge(processed, draft, tree, uniforms / 2, proposal)

    assert outcome(lenient, CASES["a chain"]).distance > CAUGHT
