"""``jspec certify`` of rules: exact rules pass, and every mistake is caught."""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec import ops
from jspec.cli import main
from jspec.tools.certify import conditionals, enumeration, exact, sampled
from jspec.tools.certify.statistics import bias, excess
from jspec.verify import RULES, Rule
from tests.verify import test_mutations as mutations

DEMO = Path(jspec.__file__).parent / "assets" / "demo" / "target"
NGRAM = {"method": "ngram", "num_speculative_tokens": 3}
CHAINS = frozenset({"chain"})


def lenient(processed, draft, tree, uniforms, proposal):
    """Accept up to twice as often as rejection sampling does."""
    return RULES["rejection"].walk(processed, draft, tree, uniforms / 2, proposal)


def eager(processed, draft, tree, draws, proposal):
    """Follow the target's draws, and then one node further."""
    path, num_accepted, logits = RULES["match"].walk(processed, draft, tree, draws, proposal)
    return path, jnp.minimum(num_accepted + 1, tree.max_depth), logits


LENIENT = Rule("lenient", lenient, "round", CHAINS)
EAGER = Rule("eager", eager, "target", CHAINS)

# --------------------------------------------------------------------------- exact distributions


@pytest.mark.parametrize("measure", [exact.distribution, sampled.chi_square])
def test_arguments_that_are_no_sampling_filters_are_refused(measure):
    with pytest.raises(TypeError, match=r"unknown arguments \['max_tokens'\]; give some of"):
        measure("rejection", max_tokens=3)


@pytest.mark.parametrize(
    ("rule", "proposal"),
    [
        ("rejection", "chain"),
        ("block", "chain"),
        ("coupled", "without_replacement"),
        ("rejection", "deterministic"),
        *(
            pytest.param(rule, proposal, marks=pytest.mark.slow)
            for rule in ("rejection", "block")
            for proposal in ("without_replacement", "top_plus_one", "mixed", "deterministic_last")
        ),
    ],
)
def test_shipped_rules_have_the_targets_distribution(rule, proposal):
    finding = exact.distribution(rule, proposal, temperature=0.9, top_k=2)
    assert finding.passed and finding.measured < 1e-12
    assert rule in finding.subject and "top_k=2" in finding.subject


FAST = ("rejection draws again from p", "recorded distributions are one node late")


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
    proposal = "deterministic" if case is mutations.CERTAIN else "chain"
    finding = exact.distribution(Rule("mutant", mutant, "round", CHAINS), proposal)
    assert not finding.passed
    assert finding.measured > 1e-3 or "raises" in finding.note  # it has no draft vocabulary


def judges_as_mixed(rule):
    return lambda *arguments: RULES[rule].walk(*arguments[:4], "mixed")


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize(
    ("proposal", "walk"),
    [
        ("without_replacement", mutations.with_stale_q),
        ("deterministic_last", judges_as_mixed),
        ("without_replacement", lambda rule: mutations.draws_again_from_p(RULES[rule].walk)),
        ("deterministic", lambda rule: mutations.draws_again_from_p(RULES[rule].walk)),
    ],
)
def test_rules_of_trees_that_are_off_are_caught(rule, proposal, walk):
    mutant = Rule("mutant", walk(rule), "round", frozenset({proposal}))
    finding = exact.distribution(mutant, proposal)
    assert not finding.passed and finding.measured > 1e-3


def test_distributions_are_enumerated_in_float64_on_the_cpu_where_there_is_one(monkeypatch):
    [cpu] = jax.local_devices(backend="cpu")

    def where():
        with conditionals.float64():
            array = jnp.ones(1) / 3
        return array.dtype, array.devices()

    assert where() == (jnp.float64, {cpu})
    monkeypatch.setattr(conditionals, "_cpu", lambda: None)
    assert where() == (jnp.float64, {jax.devices()[0]})


def test_a_uniform_of_zero_that_accepts_an_excluded_token_is_caught():
    walk = mutations.compares_with_less_or_equal(RULES["rejection"].walk)
    finding = exact.distribution(Rule("mutant", walk, "round", CHAINS))
    assert not finding.passed and "a uniform of exactly 0 accepts a token" in finding.note


def test_the_users_rule_is_certified_by_its_dotted_path():
    finding = exact.distribution("tests.tools.certify.test_certify.LENIENT")
    assert not finding.passed and finding.measured > 1e-2
    assert "lenient" in finding.subject and "worst with" in finding.note


def test_a_rule_that_leaves_the_targets_draws_is_caught():
    assert exact.distribution(EAGER).measured > 0.1


def test_a_lossy_rule_fails():
    (finding,) = exact.distributions("typical")
    assert not finding.passed and "lossless=False" in finding.subject


def test_a_bias_after_a_rare_text_counts_in_full():
    finding = enumeration.outcome(RULES["rejection"], mutations.SOFT)
    assert finding.worst_context(mutations.V) < 1e-12
    finding.probs[-2:] = finding.probs[-2:][::-1]
    last = finding.target_probs[-mutations.V :] / finding.target_probs[-mutations.V :].sum()
    assert finding.worst_context(mutations.V) == pytest.approx(abs(last[-1] - last[-2]))
    assert finding.distance < finding.worst_context(mutations.V)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rule": "standard"}, "rule='standard' is not known; use one of rejection"),
        ({"rule": "no_such_package.MINE"}, "cannot be imported: No module named 'no_such_package'"),
        (
            {"rule": "tests.tools.certify.test_certify.CHAINS"},
            "is a frozenset, not a jspec.verify.Rule",
        ),
        ({"proposal": "drawn"}, "proposal='drawn' is not known; use one of 'deterministic'"),
        ({"tree": [0, 0]}, "-1 at the root"),
        ({"tree": [-1, 0, 1, 2, 3]}, "is 4 edges deep; at most 3 fit"),
        ({"tree": [-1, 0, 0]}, "has siblings, but proposal='chain' has none"),
        ({"temperature": 0.0}, "temperature=0.0 must be more than 0"),
        ({"top_p": 1.5}, "top_p=1.5 must be in (0, 1]"),
    ],
)
def test_what_cannot_be_enumerated_is_refused(arguments, message):
    with pytest.raises(ValueError) as error:
        exact.distribution(**{"rule": "rejection"} | arguments)
    assert message in str(error.value) and "\n" not in str(error.value)


# ------------------------------------------------------------------------------- compiled programs


def test_a_bias_shows_in_few_counts_of_many_tokens():
    distribution = np.full(10_000, 1e-4)
    some, rng = np.arange(10_000) < 3000, np.random.default_rng(0)
    right, wrong = (
        rng.multinomial(512, np.where(some, 1 + much, 1 - much * 3 / 7) * distribution)
        for much in (0, 0.5)
    )
    assert bias(right, distribution, some) < 1 < bias(wrong, distribution, some)
    assert excess(wrong, distribution) < 1
    assert bias(right, distribution, distribution > 1) == 0


def test_the_compiled_rule_draws_from_the_targets_distribution():
    finding = sampled.chi_square("rejection", temperature=1.2)
    assert finding.passed and "V=16" in finding.subject


def test_counts_are_compared_where_all_bins_expect_alike_and_where_most_expect_little():
    alike = np.full(4, 0.25)
    assert excess(np.array([200, 100, 100, 100]), alike) > 1 > excess(np.full(4, 125), alike)
    rare = np.array([0.5, 0.4, 0.09, *[0.001] * 10])
    assert excess(np.array([500, 400, 90, *[1] * 10]), rare) < 0
    assert excess(np.array([500, 400, 0, *[10] * 10]), rare) > 1


def test_a_leniency_of_a_twentieth_is_seen_in_the_compiled_rule():
    walk = lambda processed, draft, tree, uniforms, proposal: RULES["rejection"].walk(
        processed, draft, tree, 0.95 * uniforms, proposal
    )
    assert not sampled.chi_square(Rule("lenient", walk, "round", CHAINS)).passed


# ------------------------------------------------------------------------------------- back-ends


@pytest.mark.parametrize("measure", [exact.distribution, sampled.chi_square])
def test_a_rule_is_certified_by_the_kernel_that_judges_instead(measure, monkeypatch):
    finding = measure("block", backend="pallas_tpu", temperature=0.9, top_k=2)
    assert finding.passed and finding.subject.startswith("block by pallas_tpu, ")
    original = ops.rejection_sampling

    def lenient(logits, settings, draft, tree, uniforms, uniform, **options):
        return original(logits, settings, draft, tree, uniforms / 8, uniform, **options)

    monkeypatch.setattr(ops, "rejection_sampling", lenient)
    jax.clear_caches()
    assert not measure("block", backend="pallas_tpu", temperature=0.9).passed
    jax.clear_caches()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rules": "match"}, "'pallas_tpu' is for the rules 'rejection' and 'block', not for 'mat"),
        ({"sampling_backend": "triton"}, "sampling_backend='triton' is not known; use None or one"),
        ({"sampling_backend": "pallas_gpu"}, "does not run on 'cpu', and JAX does not interpret "),
        (
            {"model": DEMO, "speculative_config": NGRAM},
            "pallas_tpu' runs on a TPU alone, and JAX's device is a CPU",
        ),
    ],
)
def test_a_backend_that_certifies_nothing_is_refused(arguments, message):
    with pytest.raises(ValueError) as error:
        jspec.certify(**{"sampling_backend": "pallas_tpu"} | arguments)
    assert message in str(error.value)


# -------------------------------------------------------------------------------- the command line


def run(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["jspec", "certify", *map(str, arguments)])
    with pytest.raises(SystemExit) as stopped:
        main.main()
    return stopped.value.code, *capsys.readouterr()


def test_the_command_names_failures_and_ends_with_code_1(monkeypatch, capsys, tmp_path):
    file = tmp_path / "finding.json"
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
