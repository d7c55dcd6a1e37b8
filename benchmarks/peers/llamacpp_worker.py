"""llama.cpp on a CPU as a peer, through the package xllamacpp.

    python benchmarks/peers/llamacpp_worker.py --model GGUF [--mode plain] [--threads 2]

It multiplies the quantised weights of the file, in its own dtypes: a person with a GGUF file would
use it instead. The protocol is that of ``jspec.tools.bench.peer_transformers``, with these limits:
it stops at the file's own stop tokens, and ``prompt_lookup`` drafts with its own sizes
(``ngram-simple``).
"""

import argparse
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

_ROOT = str(Path(__file__).resolve().parents[2])
_LONGEST_TEXT = 4096  # tokens, those of its prompt included


class Worker:
    """A server of llama.cpp in this process, without HTTP."""

    def __init__(self, model: Path, mode: str, threads: int, batch_size: int):
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = str(model)
        params.n_parallel, params.n_ctx = batch_size, batch_size * _LONGEST_TEXT
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        params.n_gpu_layers = params.port = params.cache_ram_mib = 0  # port 0: any free one
        if mode == "prompt_lookup":
            kind = xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE
            params.speculative.types = [kind]
        self.threads, self.batch_size = threads, batch_size
        self.server = xllamacpp.Server(params)

    def info(self) -> dict[str, Any]:
        """Return versions and threads."""
        return {"xllamacpp": metadata.version("xllamacpp"), "threads": self.threads}

    def generate(self, request: dict[str, Any]) -> dict[str, Any]:
        """Time the completion of all prompts, as many at once as were asked for."""
        settings = {
            "max_tokens": request["max_new_tokens"],
            "temperature": request["temperature"],
            "seed": request.get("seed", 0),
            "top_k": 0,  # no filter: each of its defaults changes the distribution
            "top_p": 1.0,
            "min_p": 0.0,
            "repeat_penalty": 1.0,
            "cache_prompt": False,  # every sample asks the same prompts
            "return_tokens": True,
            "verbose": True,  # replies have token ids
        }
        asked = [settings | {"prompt": ids} for ids in request["prompts"]]
        with ThreadPoolExecutor(self.batch_size) as pool:
            begin, cpu = time.perf_counter(), time.process_time()
            answers = list(pool.map(self.server.handle_completions, asked))
            seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
        passes = sum(map(_passes, answers)) if request.get("count_passes") else None
        tokens = [answer["__verbose"]["tokens"] for answer in answers]
        return {"tokens": tokens, "seconds": seconds, "cpu_seconds": cpu, "passes": passes}


def _passes(answer: dict[str, Any]) -> int:
    """Return the passes of the target for an answer: its tokens without accepted drafts."""
    timings = answer["timings"]
    return timings["predicted_n"] - timings.get("draft_n_accepted", 0)


def main() -> None:
    """Load the model and serve requests until stdin ends."""
    parser = argparse.ArgumentParser(description="llama.cpp behind a pipe")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--mode", choices=("plain", "prompt_lookup"), default="plain")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=1)
    arguments = parser.parse_args()
    sys.path.insert(0, _ROOT)  # this environment has no jspec; ``serve`` removes it again
    from jspec.tools.bench import peer_transformers

    peer_transformers.serve(lambda: Worker(**vars(arguments)))
    os._exit(0)  # its server would wait for requests when Python ends


if __name__ == "__main__":
    main()
