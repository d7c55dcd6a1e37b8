"""``benchmarks.rounds``: passes of the target over so many nodes."""

import json

from benchmarks import rounds


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
