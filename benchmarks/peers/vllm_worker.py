"""vLLM on a CPU as a peer, with one way of drafting a process.

    python benchmarks/peers/vllm_worker.py --model DIR [--config JSON] [--dtype bfloat16]

The protocol is that of ``jspec.tools.bench.peer_transformers``. A call gets all requests of a
category; vLLM runs ``--batch-size`` of them together. The mode and the threads are those that the
process is started with: vLLM drafts in one way, and OpenMP takes its threads at the start. With
``count_passes`` a reply has the passes of the target: generated tokens without accepted drafts, by
vLLM's own counter, which also counts those behind the end of a text. Sampled texts differ from call
to call.
"""

import argparse
import json
import os
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

_ROOT = str(Path(__file__).resolve().parents[2])
_ACCEPTED = "vllm:spec_decode_num_accepted_tokens"


class Worker:
    """An ``LLM`` of vLLM."""

    def __init__(self, arguments: argparse.Namespace):
        os.environ |= {
            "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB, all of it in use at once in each of the workers
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_NO_USAGE_STATS": "1",
            # Threads bound to cores would exclude one another when several workers are alive.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(arguments.threads),
        }
        import vllm

        self.vllm, self.threads = vllm, arguments.threads
        self.llm = vllm.LLM(
            arguments.model,
            dtype=arguments.dtype,
            max_num_seqs=arguments.batch_size,
            speculative_config=arguments.config,
            enable_prefix_caching=False,  # every sample asks the same prompts
            disable_log_stats=False,  # for the counter of accepted tokens
        )

    def info(self) -> dict[str, Any]:
        """Return versions and threads."""
        names = "vllm-cpu", "vllm", "torch"
        versions = {name: _version(name) for name in names}
        return {name: it for name, it in versions.items() if it} | {"threads": self.threads}

    def generate(self, request: dict[str, Any]) -> dict[str, Any]:
        """Time one call of ``generate``."""
        params = self.vllm.SamplingParams(
            temperature=request["temperature"],
            max_tokens=request["max_new_tokens"],
            ignore_eos=True,
            stop_token_ids=request["eos_token_ids"],
            detokenize=False,
        )
        prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
        counting = request.get("count_passes")
        accepted = self._accepted() if counting else 0
        begin, cpu = time.perf_counter(), time.process_time()
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        passes = None
        if counting:
            passes = sum(map(len, tokens)) - (self._accepted() - accepted)
        return {"tokens": tokens, "seconds": seconds, "cpu_seconds": cpu, "passes": passes}

    def _accepted(self) -> int:
        metrics = self.llm.get_metrics()
        return sum(int(metric.value) for metric in metrics if metric.name == _ACCEPTED)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _preload() -> None:
    """Start anew with Intel's OpenMP, as vLLM advises: without it speculation is much slower.

    It comes with ``vllm-cpu``. The linker reads LD_PRELOAD at the start of a process only.
    """
    library = Path(sys.prefix) / "lib" / "libiomp5.so"
    if library.is_file() and "libiomp5" not in os.environ.get("LD_PRELOAD", ""):
        os.environ["LD_PRELOAD"] = str(library)
        os.execv(sys.executable, [sys.executable, "-E", *sys.argv])


def main() -> None:
    """Load the model and serve requests until stdin ends."""
    parser = argparse.ArgumentParser(description="vLLM behind a pipe")
    parser.add_argument("--model", required=True)
    parser.add_argument("--config", type=json.loads, help="speculative_config as JSON")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=1)
    arguments = parser.parse_args()
    _preload()
    sys.path.insert(0, _ROOT)  # this environment has no jspec; ``serve`` removes it again
    from jspec.tools.bench import peer_transformers

    peer_transformers.serve(lambda: Worker(arguments))


if __name__ == "__main__":
    main()
