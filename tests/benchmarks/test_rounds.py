"""``benchmarks.rounds``: passes of the target over so many nodes, and rounds of an ``LLM``."""

import json

import pytest

from benchmarks import rounds

TINY = "--llm --shape tiny --layers 1 --slots 2 --prompt-tokens 40 --max-tokens 16 --repeats 1"


def test_passes_of_a_tiny_model_are_timed_on_any_machine(tmp_path):
    out = tmp_path / "out.json"
    rounds.main(
        [
            *(
                "--shape",
                "tiny",
                "--layers",
                "1",
                "--fit",
                "--nodes",
                "1",
                "8",
                "--attention",
                "xla",
            ),
            *("--slots", "2", "--prompt-tokens", "64", "--repeats", "1", "--out", str(out)),
        ]
    )
    results = json.loads(out.read_text())
    sizes = ("attention", "nodes", "slots", "context")
    measured = [tuple(row[name] for name in sizes) for row in results["rows"]]
    assert measured == [("xla", 1, 2, 64), ("xla", 8, 2, 64)]
    assert all(0 < row["ms_least"] <= row["ms_per_pass"] for row in results["rows"])
    assert results["layers"] == 1 and {"device", "versions", "commit", "argv"} <= results.keys()


def test_a_round_of_an_llm_is_compared_with_weights_and_live_kv_read_once(tmp_path, monkeypatch):
    monkeypatch.setattr(rounds, "bandwidth", lambda: 1e9)
    out = tmp_path / "rounds.json"
    rounds.main([*TINY.split(), "--methods", "none", "ngram", "--out", str(out)])
    results = json.loads(out.read_text())
    hidden, heads, vocab, inner = 64, (4, 2, 2), 512, 128
    layer = hidden * (16 * sum(heads) + 64 + 3 * inner) + 2 * hidden
    weights = 2 * (layer + hidden + vocab * hidden)  # bfloat16, without the embedding
    live = 2 * (40 + 8) * 2 * 2 * 16 * 2  # rows, tokens, keys and values, heads, features, bytes
    assert [row["method"] for row in results["rows"]] == ["none", "ngram"]
    for row in results["rows"]:
        assert row["minimum_bytes"] == weights + live
        assert row["minimum_ms"] == pytest.approx((weights + live) / 1e6, abs=1e-3)


def test_an_llm_has_no_head_of_random_weights(capsys):
    with pytest.raises(SystemExit):
        rounds.main([*TINY.split(), "--methods", "eagle3"])
    assert "add --methods none ngram" in capsys.readouterr().err
