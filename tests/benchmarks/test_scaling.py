"""Weak scaling of replicas: who gets how much work on which cores, and the figures of it."""

import argparse
import json
import os

import pytest

from benchmarks import scaling

SETTINGS = argparse.Namespace(replicas=2, prompts=3, max_tokens=4)


def test_every_replica_has_cores_of_its_own_and_as_much_work_as_one_alone():
    started, calls = [], []

    def start(kind, cores):
        started.append((kind.__name__, cores))

        def call(count, tokens, seed):
            calls.append((tuple(cores), count, seed))
            return 0.0, [[1] * tokens] * count

        return call

    made = scaling.contenders(start, list, [0, 1, 2, 3, 4], SETTINGS)
    assert started[:2] == [("Replica", [0, 1]), ("Replica", [2, 3])]
    assert started[2:4] == [("Multiplier", [0, 1]), ("Multiplier", [2, 3])]
    assert started[4:] == [("Replica", [0, 1, 2, 3])]
    calls.clear()
    sample = made["all"].run()
    assert calls == [((0, 1), 3, 2), ((2, 3), 3, 2)] and sample.num_tokens == 2 * 3 * 4
    calls.clear()
    made["whole"].run()
    assert calls == [((0, 1, 2, 3), 6, 2)]


def test_efficiency_is_that_of_the_median_turn_and_noisy_turns_are_counted():
    made = {}
    speeds = {"one": 100, "all": 150, "whole": 120, "machine, one": 10, "machine, all": 18}
    for name, speed in speeds.items():
        samples = [scaling.Sample(1.0, 1.0, [[0] * speed], foreign=noise) for noise in (0.0, 0.5)]
        made[name] = scaling.Contender(name, run=None, samples=samples)
    results = scaling.summary(made, 2)
    assert results["efficiency"] == {"median": 0.75, "least": 0.75, "most": 0.75}
    assert results["machine"]["median"] == 0.9 and results["all_by_whole"] == 1.25
    assert (results["noisy_turns"], results["turns"]) == (5, 10)
    assert scaling.table(results).title == "2 replicas, 5 of 10 turns noisy"


def test_more_replicas_than_cores_are_refused(capsys):
    cores = len(os.sched_getaffinity(0))
    with pytest.raises(SystemExit):
        scaling.main(["--replicas", str(cores + 1)])
    assert f"must be at most the {cores} cores; take fewer --replicas" in capsys.readouterr().err


@pytest.mark.slow
def test_replicas_run_under_ray(tmp_path, monkeypatch):
    pytest.importorskip("ray", reason="pip install ray")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    words = ["--replicas", "1", "--prompts", "2", "--max-tokens", "8", "--repeats", "1"]
    scaling.main([*words, "--patience", "0", "--out", str(tmp_path / "out.json")])
    results = json.loads((tmp_path / "out.json").read_text())
    assert results["replicas"] == 1 and results["tokens_per_second"]["all"] > 0
