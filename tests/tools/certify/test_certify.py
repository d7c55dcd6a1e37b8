"""``jspec certify``: what is exact passes, and every mistake that it is for is caught."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.cli import main
from jspec.tools.certify import chains, exactly, sampled
from jspec.tools.certify import distribution as distributions
from jspec.tools.certify.statistics import excess, lean
from jspec.verify import RULES, Rule
from tests.verify import test_mutations as mutations

CHAINS, SIBLINGS = frozenset({"chain"}), frozenset({"without_replacement", "iid"})


def lenient(processed, draft, tree, uniforms):
    """Accepts half as much again as it may."""
    return RULES["rejection"].walk(processed, draft, tree, uniforms / 2)


def eager(processed, draft, tree, draws):
    """Follows the target's draws, and then one node further."""
    path, num_accepted, logits = RULES["match"].walk(processed, draft, tree, draws)
    return path, jnp.minimum(num_accepted + 1, tree.max_depth), logits


LENIENT = Rule("lenient", lenient, "round", CHAINS)
EAGER = Rule("eager", eager, "target", CHAINS)

# ------------------------------------------------------------------------------------------- laws


@pytest.mark.parametrize(
    ("rule", "proposal"),
    [
        ("rejection", "chain"),
        ("block", "chain"),
        ("coupled", "iid"),
        ("rejection", "point"),
        *(
            pytest.param(rule, proposal, marks=pytest.mark.slow)
            for rule in ("rejection", "block")
            for proposal in ("iid", "without_replacement", "top_plus_one", "mixed", "points_last")
        ),
    ],
)
def test_shipped_rules_have_the_targets_law(rule, proposal):
    found = distributions.distribution(rule, proposal, temperature=0.9, top_k=2)
    assert found.passed and found.measured < 1e-12
    assert rule in found.subject and "top_k=2" in found.subject


FAST = ("rejection draws again from p", "recorded laws are one node late")


@pytest.mark.parametrize(
    "mistake",
    [
        *FAST,
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in mutations.WRONG_RULES
            if each not in FAST
        ),
    ],
)
def test_rules_of_chains_that_are_off_are_caught(mistake):
    mutant, case = mutations.WRONG_RULES[mistake]
    proposal = "point" if case is mutations.POINT else "chain"
    found = distributions.distribution(Rule("mutant", mutant, "round", CHAINS), proposal)
    assert not found.passed
    assert found.measured > 1e-3 or "raises" in found.note  # it knows no draft vocabulary


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize(
    ("proposal", "walk"),
    [
        ("without_replacement", mutations.with_replacement),
        ("iid", lambda rule: RULES[rule].walk),
        ("points_last", lambda rule: RULES[rule].walk),
        ("without_replacement", lambda rule: mutations.draws_again_from_p(RULES[rule].walk)),
        ("point", lambda rule: mutations.draws_again_from_p(RULES[rule].walk)),
    ],
)
def test_rules_of_trees_that_are_off_are_caught(rule, proposal, walk):
    found = distributions.distribution(Rule("mutant", walk(rule), "round", SIBLINGS), proposal)
    assert not found.passed and found.measured > 1e-3


def test_laws_are_enumerated_in_float64_on_the_cpu_where_there_is_one(monkeypatch):
    [cpu] = jax.local_devices(backend="cpu")

    def where():
        with exactly.float64():
            array = jnp.ones(1) / 3
        return array.dtype, array.devices()

    assert where() == (jnp.float64, {cpu})
    monkeypatch.setattr(exactly, "_cpu", lambda: None)
    assert where() == (jnp.float64, {jax.devices()[0]})


def test_a_coin_of_zero_that_passes_where_nothing_may_is_caught():
    walk = mutations.compares_with_less_or_equal(RULES["rejection"].walk)
    found = distributions.distribution(Rule("mutant", walk, "round", CHAINS))
    assert not found.passed and "a coin of exactly 0 lets a token through" in found.note


def test_a_rule_of_ones_own_is_certified_by_its_dotted_path():
    found = distributions.distribution("tests.tools.certify.test_certify.LENIENT")
    assert not found.passed and found.measured > 1e-2
    assert "lenient" in found.subject and "worst with" in found.note


def test_a_rule_that_leaves_the_targets_draws_is_caught():
    assert distributions.distribution(EAGER).measured > 0.1


def test_a_lossy_rule_is_no_rule_to_certify():
    (found,) = distributions.distributions("typical")
    assert not found.passed and "lossless=False" in found.subject


def test_a_bias_after_a_rare_text_counts_in_full():
    found = chains.outcome("rejection", mutations.SOFT)
    assert found.worst_context(mutations.V) < 1e-12
    found.distribution = found.distribution.copy()
    found.distribution[-2:] = found.distribution[-2:][::-1]
    last = found.exact[-mutations.V :] / found.exact[-mutations.V :].sum()
    assert found.worst_context(mutations.V) == pytest.approx(abs(last[-1] - last[-2]))
    assert found.distance < found.worst_context(mutations.V)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rule": "standard"}, "rule='standard' is not known; use one of rejection"),
        ({"rule": "no_such_package.MINE"}, "cannot be imported: No module named 'no_such_package'"),
        (
            {"rule": "tests.tools.certify.test_certify.CHAINS"},
            "is a frozenset, not a jspec.verify.Rule",
        ),
        ({"proposal": "drawn"}, "proposal='drawn' is not known; use one of 'point'"),
        ({"tree": [0, 0]}, "-1 at the root"),
        ({"tree": [-1, 0, 1, 2, 3]}, "is 4 edges deep; at most 3 fit"),
        ({"tree": [-1, 0, 0]}, "has siblings, but proposal='chain' has none"),
        ({"temperature": 0.0}, "temperature=0.0 must be more than 0"),
        ({"top_p": 1.5}, "top_p=1.5 must be in (0, 1]"),
    ],
)
def test_what_cannot_be_enumerated_is_refused(arguments, message):
    with pytest.raises(ValueError) as error:
        distributions.distribution(**{"rule": "rejection"} | arguments)
    assert message in str(error.value) and "\n" not in str(error.value)


# ------------------------------------------------------------------------------- compiled programs


def test_few_counts_of_many_tokens_are_seen_to_lean():
    distribution = np.full(10_000, 1e-4)
    some, rng = np.arange(10_000) < 3000, np.random.default_rng(0)
    right, wrong = (
        rng.multinomial(512, np.where(some, 1 + much, 1 - much * 3 / 7) * distribution)
        for much in (0, 0.5)
    )
    assert lean(right, distribution, some) < 1 < lean(wrong, distribution, some)
    assert excess(wrong, distribution) < 1
    assert lean(right, distribution, distribution > 1) == 0


def test_the_compiled_rule_draws_from_the_targets_law():
    found = sampled.chi_square("rejection", temperature=1.2)
    assert found.passed and "V=16" in found.subject


def test_counts_are_compared_where_all_bins_expect_alike_and_where_most_expect_little():
    alike = np.full(4, 0.25)
    assert excess(np.array([200, 100, 100, 100]), alike) > 1 > excess(np.full(4, 125), alike)
    rare = np.array([0.5, 0.4, 0.09, *[0.001] * 10])
    assert excess(np.array([500, 400, 90, *[1] * 10]), rare) < 0
    assert excess(np.array([500, 400, 0, *[10] * 10]), rare) > 1


def test_a_leniency_of_a_twentieth_is_seen_in_the_compiled_rule():
    walk = lambda processed, draft, tree, uniforms: RULES["rejection"].walk(
        processed, draft, tree, 0.95 * uniforms
    )
    assert not sampled.chi_square(Rule("lenient", walk, "round", CHAINS)).passed


# -------------------------------------------------------------------------------- the command line


def run(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["jspec", "certify", *map(str, arguments)])
    with pytest.raises(SystemExit) as stopped:
        main.main()
    return stopped.value.code, *capsys.readouterr()


def test_the_command_says_what_failed_and_ends_with_code_1(monkeypatch, capsys, tmp_path):
    file = tmp_path / "found.json"
    code, out, _ = run(monkeypatch, capsys, "--rule", "typical", "--json", file)
    assert code == 1 and "FAILED" in out and "lossless=False" in out.replace("\n", "")
    saved = json.loads(file.read_text())
    assert saved["passed"] is False and saved["findings"][0]["measured"] == "nan"
    code, _, complaint = run(monkeypatch, capsys, "--rule", "standard")
    assert code == 2 and "rule='standard' is not known" in complaint


@pytest.mark.slow
def test_all_that_ships_is_certified(monkeypatch, capsys):
    code, out, _ = run(monkeypatch, capsys)
    assert code == 0 and "all passed" in out
