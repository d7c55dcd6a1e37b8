"""jspec beside transformers on one device: equal weights, and who is there at a time."""

import argparse
import importlib.util
import itertools
import json
import sys

import pytest

from benchmarks import gpu_peers

TINY = {
    "--config": "tiny",
    "--dtype": "float32",
    "--prompt-tokens": "40",
    "--max-tokens": "8",
    "--repeats": "1",
}
HAS_TORCH = importlib.util.find_spec("torch") is not None


@pytest.mark.skipif(not HAS_TORCH, reason="pip install torch")
def test_both_programs_have_the_same_weights_and_give_equal_texts(tmp_path, capsys):
    out = tmp_path / "peers.json"
    modes = ["--modes", "plain", "eager", "prompt_lookup"]
    tiny = itertools.chain(*TINY.items())
    gpu_peers.main([*tiny, *modes, "--batch", "1", "2", "--out", str(out)])
    results = json.loads(out.read_text())
    assert {"device", "versions", "commit"} <= results.keys() and results["interleaved"]
    assert results["argv"][:3] == ["benchmarks.gpu_peers", "--config", "tiny"]
    assert set(results["programs"]) == {"jspec", "transformers"}
    measured = {batch: [] for batch in (1, 2)}
    for row in results["rows"]:
        measured[row["batch"]].append(row["mode"])
        assert row["equal_tokens"] == 1 and row["tokens_per_second"] > 0
        assert len(row["seconds"]) == len(row["foreign_cores"]) == 1
    # transformers has prompt lookup for one sequence alone.
    assert measured == {1: ["plain", "eager", "prompt_lookup"], 2: ["plain", "eager"]}
    assert "prompt_lookup" in capsys.readouterr().out


def test_programs_run_one_after_the_other_where_two_models_do_not_fit():
    modes = ["plain", "compiled"]
    settings = argparse.Namespace(config="8b", dtype="bfloat16", together=None, modes=modes)
    both, alone = [["jspec", "transformers"]], [["jspec"], ["transformers"]]
    assert gpu_peers.groups(int(139e9), settings) == both
    assert gpu_peers.groups(int(24e9), settings) == alone
    settings.modes = ["ngram"]
    assert gpu_peers.groups(int(139e9), settings) == [["jspec"]]
    settings.together, settings.modes = False, modes
    assert gpu_peers.groups(int(139e9), settings) == alone


def test_a_program_that_does_not_start_is_named_and_the_other_is_there(tmp_path):
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\nexit 7\n")
    broken.chmod(0o755)
    settings = argparse.Namespace(
        config="tiny", dtype="float32", peer=str(broken), prompt_tokens=40, max_tokens=8
    )
    with gpu_peers.started(["jspec", "transformers"], "cpu", settings) as entered:
        assert entered["jspec"].info == {"device": "cpu"}
        assert str(entered["transformers"]) == "the peer ended with status 7"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--peer", "false"], "--peer false has no torch"),
        (["--max-tokens", "4", "--peer", sys.executable], "--max-tokens must be more than 4"),
    ],
)
def test_bad_settings_are_named_before_any_work(words, named, capsys):
    with pytest.raises(SystemExit):
        gpu_peers.main(words)
    assert named in capsys.readouterr().err
