"""``benchmarks.arrival``: the draws that it compares, and its count of texts that part."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import arrival
from jspec.core import sampling


@pytest.mark.parametrize("draw", [arrival.by_running_sum, arrival.by_all_gumbels])
def test_the_other_draws_have_the_distribution_too(draw):
    log_weights = jnp.broadcast_to(jnp.log(jnp.array([0.5, 0.0, 0.3, 0.2])), (8000, 4))
    keys, roots = jax.random.split(jax.random.key(0), 8000), jnp.arange(8000)
    uniforms = sampling.round_noise(keys, roots, sampling.DRAFT, 1)[:, 0]
    shares = np.bincount(jax.jit(draw)(log_weights, uniforms), minlength=4) / 8000
    np.testing.assert_allclose(shares, [0.5, 0, 0.3, 0.2], atol=0.02)


def test_texts_part_at_their_first_other_token_or_at_the_end_of_the_shorter_one():
    one = np.array([5, 6, 7])
    for other, position in (([5, 6, 7], None), ([5, 9, 7], 1), ([5, 6], 2), ([5, 6, 7, 8], 3)):
        assert arrival.first_difference(one, np.array(other)) == position


@pytest.mark.slow
def test_the_program_reports_every_draw_method_and_rule(monkeypatch, tmp_path):
    out = tmp_path / "arrival.json"
    words = ["--texts", "3", "--tokens", "4", "--slots", "2", "--repeats", "1", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["arrival", "--methods", "eagle3", *words])
    arrival.main()
    results = json.loads(out.read_text())
    rows = [(row["draw"], row["rule"], row["texts"]) for row in results["texts"]]
    draws = ("running sum", "blocks")
    assert rows == [(draw, rule, 3) for draw in draws for rule in ("rejection", "block")]
    assert {row["draw"] for row in results["draws"]} == {*draws, "all Gumbels"}
    assert sampling.draw is not arrival.by_running_sum
