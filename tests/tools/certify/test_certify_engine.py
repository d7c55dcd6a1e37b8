"""``jspec certify --engine``: texts do not depend on other sequences, and mistakes are seen."""

import dataclasses
import json
import sys

import jax.numpy as jnp
import pytest

import jspec
from jspec.cli import main
from jspec.core.types import Params
from jspec.engine.block_pool import BlockPool
from jspec.engine.plan import Plan
from jspec.engine.sequences import SequenceParams
from jspec.tools.certify.engine_texts import engine_texts
from tests import llm_fixtures, tiny
from tests.fakes import TableDrafter, ToyTarget, table

ROWS = [
    SequenceParams(prompt, max_tokens=70, temperature=0.8 * (stream % 2), stream=stream)
    for stream, prompt in enumerate(tiny.prompts((60, 3, 20)))
]


@pytest.mark.parametrize("drafter", [pytest.param(tiny.NGRAM, marks=pytest.mark.slow), tiny.DRAFT])
def test_texts_of_a_shared_engine_are_those_alone(drafter):
    findings, remarks = engine_texts(Plan(tiny.TARGET, drafter), tiny.params(), ROWS)
    assert not remarks
    assert [(each.check, each.measured, each.note) for each in findings] == [("engine", 0, "")] * 3
    for each, how in zip(findings, ("cold", "warm", "preempted"), strict=True):
        known = "210 of 210 tokens behind 3 prompts are those alone"
        assert each.subject.endswith(f"temperature=0.8, batched, {how}: {known}")


def test_pages_that_hold_another_text_are_caught(monkeypatch):
    def of_position(pool, digests, text, salt):
        digests[:] = [bytes([page]) for page in range(len(text) // pool.size)]

    monkeypatch.setattr(BlockPool, "add_digests", of_position)
    rows = [dataclasses.replace(row, prompt=(7 + row.stream, *range(1, 60)) * 3) for row in ROWS]
    findings, _ = engine_texts(Plan(tiny.TARGET, tiny.NONE), tiny.params(), rows)
    warm = findings[1]
    assert not warm.passed and "ERROR" in warm.note
    assert "alone" in warm.note and "batched, warm" in warm.note


@dataclasses.dataclass(frozen=True)
class Crowded(ToyTarget):
    """A target that prefers other tokens in a batch."""

    def forward(self, params, tokens, tree, cache, capture_layers=()):
        out = super().forward(params, tokens, tree, cache, capture_layers)
        moved = (len(tokens) > 1) * (jnp.arange(self.vocab_size) % 2 == 0)
        return out.replace(logits=out.logits + moved)


def test_a_target_whose_logits_depend_on_the_batch_is_caught_without_pages_too():
    plan, params = Plan(Crowded(8), TableDrafter(3)), Params(table(0, 8, 8), table(1, 8, 8))
    rows = [SequenceParams((token,), max_tokens=12) for token in (1, 4, 6)]
    [finding], [remark] = engine_texts(plan, params, rows)
    assert not finding.passed and finding.subject.startswith("coupled, greedy, batched: ")
    assert remark == (
        "Crowded with TableDrafter reads no pages: prefixes and preemptions were not compared."
    )


@pytest.mark.slow
def test_the_command_certifies_a_model_in_an_engine(tmp_path, monkeypatch, capsys):
    models, file = llm_fixtures.checkpoints(tmp_path), tmp_path / "found.json"
    config = {"method": "ngram", "num_speculative_tokens": 3}
    options = {"--model": models["target"], "--speculative-config": json.dumps(config)}
    options |= {"--max-tokens": 24, "--num-drafts": 128, "--json": file}
    words = [str(word) for option in options.items() for word in option]
    monkeypatch.setattr(sys, "argv", ["jspec", "certify", "--engine", *words])
    with pytest.raises(SystemExit) as stopped:
        main.main()
    saved = json.loads(file.read_text())
    assert stopped.value.code == 0 and "all passed" in capsys.readouterr().out
    assert [each["check"] for each in saved["findings"]].count("engine") == 3


def test_certificates_of_rules_have_no_engine():
    with pytest.raises(ValueError, match="engine=True is of a model; give model"):
        jspec.certify("block", engine=True)
