"""``jspec certify`` of texts: equal ones pass, and rounding is distinguished from errors."""

import dataclasses
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec.cli import main
from jspec.core import sampling
from jspec.core.types import Params
from jspec.drafters import NoDrafter
from jspec.engine.plan import Plan
from jspec.engine.sequences import SequenceParams
from jspec.tools.certify import configuration, of_plan, rounding, texts
from jspec.verify import RULES, Rule
from tests import llm_fixtures, tiny
from tests.drafters.custom import Successor
from tests.fakes import TableDrafter, ToyTarget, table
from tests.tools.certify.test_certify import EAGER

V, K = 8, 3
NOISE = 2.0**-12


@pytest.fixture
def models(tmp_path_factory):
    return llm_fixtures.checkpoints(tmp_path_factory.getbasetemp() / "models")


@dataclasses.dataclass(frozen=True)
class Shaky(ToyTarget):
    """A target whose even logits are ``noise`` higher in passes over several tokens."""

    noise: float = NOISE

    def forward(self, params, tokens, tree, cache, capture_layers=()):
        out = super().forward(params, tokens, tree, cache, capture_layers)
        moved = self.noise * (tokens.shape[1] > 1) * (jnp.arange(self.vocab_size) % 2 == 0)
        return out.replace(logits=out.logits + moved)


def tied(gap):
    """Return a table in which tokens 3 and 2 are always the likeliest, ``gap`` apart."""
    logits = np.asarray(table(0, V, V)).copy()
    logits[:, 3] = logits.max() + 1
    logits[:, 2] = logits[:, 3] - gap
    return jnp.asarray(logits)


def greedy(count=12):
    return [SequenceParams((token,), max_tokens=count) for token in (1, 4, 6)]


def compared(logits, *, noise=NOISE, rule="rejection", rows=None):
    plan = Plan(Shaky(V, noise=noise), TableDrafter(K), rule)
    return texts(plan, Params(logits, table(1, V, V)), rows or greedy())


@pytest.mark.slow
def test_texts_that_are_the_same_have_no_gap():
    finding = texts(Plan(tiny.TARGET, tiny.NGRAM), tiny.params(), greedy())
    assert finding.passed and finding.measured == 0 and finding.note == ""
    assert "greedy: 36 of 36 tokens behind 3 prompts" in finding.subject


def test_a_near_tie_passes_by_name_and_ends_the_comparison_of_its_row():
    finding = compared(tied(NOISE / 4))
    assert finding.passed and finding.measured == pytest.approx(1 / 4, rel=0.05)
    assert "0 of 36 tokens" in finding.subject
    assert "prompt 0, token 0: plain 3 (logit" in finding.note and "speculative 2 (" in finding.note
    assert "gap 6.1e-05 < 0.00024 of rounding: a near-tie" in finding.note


def test_passes_that_differ_by_more_than_rounding_are_an_error():
    finding = compared(tied(0.2), noise=0.9)
    assert not finding.passed and finding.measured == float("inf")
    assert "ERROR: plain passes of several shapes differ by more than" in finding.note


def test_a_rule_that_leaves_the_targets_draws_diverges_by_more_than_noise():
    finding = compared(table(0, V, V), rule=EAGER)
    assert not finding.passed and finding.measured > 10
    assert "an ERROR" in finding.note and "not < 0.00024 of rounding" in finding.note


def test_a_divergence_beyond_the_noise_is_an_error_beside_near_ties():
    """Use a rule that draws the second likeliest of two, whose gap exceeds the noise."""

    def second(processed, draft, tree, draws, proposal):
        path, _, logits = RULES["match"].walk(processed, draft, tree, draws, proposal)
        return path, jnp.minimum(draft.valid.sum(1) - 1, tree.max_depth), logits

    rule = Rule("second", second, "target", frozenset({"chain", "deterministic"}))
    finding = compared(tied(2 * NOISE), noise=NOISE, rule=rule)
    assert not finding.passed and finding.measured > 1


@pytest.mark.parametrize("top_k", [0, 2])
@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_the_gap_is_the_least_change_that_makes_either_token_drawn(temperature, top_k):
    logits = np.array([2.0, 1.75, 0.5, -1.0], np.float32)
    row = SequenceParams((3, 1), max_tokens=4, seed=5, temperature=temperature, top_k=top_k)
    keys = jax.random.fold_in(jax.random.wrap_key_data(jnp.array([0, 5], jnp.uint32)), 0)[None]
    noise = np.asarray(sampling.target_noise(keys, np.array([[2]]), 4))[0, 0]
    scores = logits + temperature * noise
    first, second = np.argsort(np.where(np.arange(4) < 2, -scores, np.inf))[:2].tolist()
    wanted = scores[first] - scores[second]
    assert rounding.gap(row, 0, logits, (first, second)) == pytest.approx(wanted, rel=1e-3)


def test_a_token_that_top_p_just_leaves_out_is_a_near_tie():
    logits = np.log(np.array([0.5, 0.3, 0.2], np.float32))
    keys = jax.random.wrap_key_data(jnp.array([[0, seed] for seed in range(20)], jnp.uint32))
    keys = jax.vmap(jax.random.fold_in, (0, None))(keys, 0)
    noise = np.asarray(sampling.target_noise(keys, np.ones((20, 1), int), 3))[:, 0]
    seed = int(np.argmax(noise[:, 1] - noise[:, 0]))  # would draw the second, were it kept
    change = lambda top_p: rounding.gap(
        SequenceParams((0,), temperature=1.0, top_p=top_p, seed=seed), 0, logits, (0, 1)
    )
    assert 0.003 < change(0.499) < 0.01 < 0.1 < change(0.4)


# ------------------------------------------------------------------------------- configurations


@dataclasses.dataclass(frozen=True)
class Cooler(Successor):
    """Draws from half of the logits that it records."""

    def propose(self, params, request, shared, memory, history):
        draft, memory = super().propose(params, request, shared, memory, history)
        return draft.replace(logits=None if draft.logits is None else 2 * draft.logits), memory


@pytest.mark.slow
@pytest.mark.parametrize(("drafter", "honest"), [("Cooler", False), ("Successor", True)])
def test_the_users_drafter_is_certified_by_its_dotted_path(drafter, honest, models, tmp_path):
    file = tmp_path / "table.npy"
    np.save(file, np.asarray(table(3, llm_fixtures.VOCAB, llm_fixtures.VOCAB)))
    module = (
        "tests.tools.certify.test_certify_texts" if drafter == "Cooler" else "tests.drafters.custom"
    )
    config = {
        "method": "custom_class",
        "model": f"{module}.{drafter}",
        "table": str(file),
        "num_speculative_tokens": 3,
    }
    report = jspec.certify(
        model=models["target"],
        speculative_config=config,
        max_tokens=4,
        prompts=["the quick", "def add("],
        num_drafts=1024,
    )
    assert report.passed == honest
    assert {each.check for each in report.failures} == (set() if honest else {"drafter"})


def test_a_drafter_that_cannot_share_noise_is_compared_under_match_with_a_remark():
    @dataclasses.dataclass(frozen=True)
    class Deaf(NoDrafter):
        proposal = "chain"

    @dataclasses.dataclass(frozen=True)
    class Silent(TableDrafter):
        pass

    same, remark = configuration.with_target_noise(Plan(ToyTarget(V), Deaf()))
    assert same.rule == "match" and "Deaf has no field noise" in remark
    same, remark = configuration.with_target_noise(Plan(ToyTarget(V), Silent(K)))
    assert same.rule == "coupled" and remark == ""
    plan = Plan(ToyTarget(V), Silent(K), "match")
    assert configuration.with_target_noise(plan) == (plan, "")


@pytest.mark.slow
def test_a_plan_is_certified_as_it_runs():
    plan = Plan(ToyTarget(V), TableDrafter(K), "rejection")
    rows = [dataclasses.replace(row, temperature=0.9, top_k=4) for row in greedy()]
    findings, remarks = of_plan(plan, Params(table(0, V, V), table(1, V, V)), rows, num_drafts=1024)
    assert all(each.passed for each in findings) and remarks == []
    assert [each.check for each in findings] == (
        ["distribution", "chi-square"] + ["drafter"] * 4 + ["text"] * 2
    )
    assert "chain of 3, temperature=0.9, top_k=4" in findings[0].subject
    assert "V=8, temperature=0.9, top_k=4" in findings[1].subject
    assert "coupled, temperature=0.9" in findings[-1].subject


@pytest.mark.slow
def test_a_lossy_rule_fails_whatever_its_drafter_does():
    findings, _ = of_plan(
        Plan(tiny.TARGET, tiny.NGRAM, "typical"),
        tiny.params(),
        [SequenceParams((1,), temperature=1.0, max_tokens=4)],
        num_drafts=128,
    )
    assert "lossless=False" in findings[0].subject and not findings[0].passed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"speculative_config": {"method": "ngram"}}, "is of a model; give model=... as well"),
        ({"max_tokens": 3}, "max_tokens=3 is of a model"),
        ({"deterministic": True}, "deterministic=True is of a model"),
        ({"model": "x"}, "speculative_config=None must be a mapping that names a drafter"),
        (
            {"model": "x", "rules": "block", "speculative_config": {}},
            "rules='block' is of certific",
        ),
        ({"model": "x", "tree": [-1], "speculative_config": {}}, "tree=[-1] is of certificates"),
        (
            {"model": "x", "speculative_config": {}, "temperature": 0},
            "must be more than 0: greedy texts",
        ),
        ({"model": "x", "speculative_config": {}, "max_tokens": 0}, "max_tokens=0 must be"),
        (
            {"model": "x", "speculative_config": {}, "num_drafts": 9},
            "num_drafts=9 must be a whole nu",
        ),
        ({"model": "x", "speculative_config": {"k": 1}}, "speculative_config has no key 'k'"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_before_any_work(arguments, message):
    with pytest.raises(ValueError) as error:
        jspec.certify(**arguments)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "holds no prompt"),
        ("the quick " * 90, "tokens and max_tokens=64, but the model has"),
        ({"prompt_token_ids": [1, 999]}, "prompt 0 holds token id 999, outside the vocabulary"),
    ],
)
def test_prompts_that_do_not_fit_are_refused(prompt, message, models):
    with pytest.raises(ValueError, match=message):
        jspec.certify(
            model=models["target"],
            prompts=prompt,
            speculative_config={"method": "ngram", "num_speculative_tokens": 3},
        )


def test_a_drafter_that_raises_is_reported_and_its_texts_are_not_compared():
    @dataclasses.dataclass(frozen=True)
    class Broken(NoDrafter):
        def propose(self, params, request, shared, memory, history):
            raise RuntimeError("no idea")

    plan = Plan(ToyTarget(V), Broken(), "match")
    rows = [dataclasses.replace(row, temperature=1.0) for row in greedy()]
    findings, (remark,) = of_plan(plan, Params(table(0, V, V)), rows, num_drafts=100)
    assert [each.check for each in findings if not each.passed] == ["drafter"]
    assert remark == "texts were not compared: it raises RuntimeError: no idea."


def test_the_function_and_the_package_are_both_importable():
    from jspec.tools.certify import distribution

    assert callable(jspec.certify) and callable(distribution)
    report = jspec.certify("coupled", tree=[-1, 0], temperature=0.7, vocab_size=8)
    assert report.passed and report.setting["rules"] == "coupled"
    assert all("temperature=0.7" in each.subject for each in report.findings)


def test_a_model_is_certified_from_its_files(models):
    report = jspec.certify(
        model=models["target"],
        speculative_config={"method": "ngram", "num_speculative_tokens": 3},
        prompts=["the quick", {"prompt_token_ids": [4, 5, 6, 4, 5]}],
        max_tokens=8,
        num_drafts=128,
    )
    assert report.passed and report.setting["dtype"] == "float32"
    assert [each.check for each in report.findings] == ["distribution", "chi-square", "drafter"] + (
        ["text"] * 2
    )
    assert "NGram drafts deterministically" in report.remarks[0]


@pytest.mark.slow
def test_the_command_certifies_a_model_with_its_drafter(models, monkeypatch, capsys, tmp_path):
    config = {"model": str(models["draft"]), "num_speculative_tokens": 3}
    file = tmp_path / "found.json"
    arguments = [
        "jspec",
        "certify",
        "--model",
        str(models["target"]),
        "--speculative-config",
        json.dumps(config),
        "--prompt",
        "the quick",
        "--prompt",
        "def add(x",
        "--max-tokens",
        "8",
        "--num-drafts",
        "512",
        "--json",
        str(file),
    ]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as stopped:
        main.main()
    out = capsys.readouterr().out
    saved = json.loads(file.read_text())
    assert stopped.value.code == 0 and "all passed" in out
    assert saved["passed"] and saved["setting"]["prompts"] == "2"
    assert [each["check"] for each in saved["findings"]][-2:] == ["text", "text"]
    assert "16 of 16 tokens" in saved["findings"][-1]["subject"]
