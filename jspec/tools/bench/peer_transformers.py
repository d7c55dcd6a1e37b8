"""The peer: transformers on torch CPU, as a worker that keeps its models loaded.

    python jspec/tools/bench/peer_transformers.py --model DIR [--draft DIR] [--dtype float32]

``jspec.tools.bench.peer.Peer`` starts it, so that torch has its own process and environment and
never runs at the same time as JAX. The protocol is one JSON object a line, a request on stdin and
its reply on stdout. The first reply, before any request, holds versions: the models are loaded. The
workers of other peers (``benchmarks/peers``) speak it too: they call ``serve``.

    {"mode": "eager",                        eager | compiled | assisted | prompt_lookup
     "prompts": [[1, 2], [3, 4]],            token ids; ragged batches are padded on the left
     "max_new_tokens": 128,                  exactly so many, unless a stop token ends the text
     "eos_token_ids": [],                    stop tokens; [] for none
     "temperature": 0.8, "seed": 0,          0 is greedy; no other filter
     "threads": 2,                           torch.set_num_threads for this call
     "num_speculative_tokens": 4,            assisted, prompt_lookup: K, the same in every round
     "ngram_max": 3,                         prompt_lookup: longest n-gram looked for (down to 1)
     "count_passes": false}                  also count the target's passes: not for timed calls
        -> {"ok": true, "tokens": [[...], ...], "seconds": wall, "cpu_seconds": of all threads,
            "passes": null or the passes of the target}
    failures       -> {"ok": false, "error": "..."}

Seconds cover ``generate`` alone, from token ids to token ids, in ``torch.inference_mode``, which is
a tenth faster than its own ``no_grad``.
"""

import argparse
import contextlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

# Settings of JAX must not affect torch: the worker runs with torch's own defaults.
_FOREIGN = ("JAX_", "XLA_", "OMP_", "GOMP_", "KMP_", "MKL_", "TORCH")
MODES = ("eager", "compiled", "assisted", "prompt_lookup")


class Worker:
    """The loaded models."""

    def __init__(self, model: str, draft: str | None, dtype: str):
        import torch
        from transformers.utils import logging

        logging.disable_progress_bar()
        logging.set_verbosity_error()  # assisted generation warns about its own inner call
        self.torch = torch
        self.target = self._load(model, dtype)
        self.draft = self._load(draft, dtype) if draft else None

    def _load(self, path: str, dtype: str) -> Any:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(self.torch, dtype)).eval()
        # Without a stop token every answer has max_new_tokens; forbidding it instead
        # (min_new_tokens) would charge the peer for a logits processor.
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0
        return model

    def info(self) -> dict:
        """Return versions and threads."""
        import transformers

        return {
            "torch": self.torch.__version__,
            "transformers": transformers.__version__,
            "threads": self.torch.get_num_threads(),
        }

    def generate(self, request: dict) -> dict:
        """Time one call of ``generate``."""
        torch = self.torch
        threads = request.get("threads")
        if threads and threads != torch.get_num_threads():
            torch.set_num_threads(threads)
        ids, mask = self._batch(request["prompts"])
        settings = self._settings(request, ids.shape[1])
        torch.manual_seed(request.get("seed", 0))
        counter = self._counter() if request.get("count_passes") else contextlib.nullcontext()
        with counter as passes, torch.inference_mode():
            start, cpu = time.perf_counter(), time.process_time()
            out = self.target.generate(ids, attention_mask=mask, **settings)
            tokens = _ended(out[:, ids.shape[1] :].tolist(), request.get("eos_token_ids", ()))
            seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
        return {
            "tokens": tokens,
            "seconds": seconds,
            "cpu_seconds": cpu,
            "passes": passes and len(passes),
        }

    def _batch(self, prompts: list[list[int]]) -> tuple[Any, Any]:
        """Return token ids and attention mask; a mask of ones costs nothing."""
        longest = max(map(len, prompts))
        ids = [[0] * (longest - len(prompt)) + prompt for prompt in prompts]
        mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        return self.torch.tensor(ids), self.torch.tensor(mask)

    def _settings(self, request: dict, prompt_length: int) -> dict:
        mode, temperature = request.get("mode", "eager"), request.get("temperature", 0.0)
        if mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}; got {mode!r}")
        settings = {"max_new_tokens": request["max_new_tokens"], "do_sample": temperature > 0}
        if request.get("eos_token_ids"):
            settings["eos_token_id"] = request["eos_token_ids"]
        if temperature > 0:
            # The default of top_k is 50.
            settings |= {"temperature": temperature, "top_k": 0, "top_p": 1.0}
        if mode == "compiled":
            settings |= self._compiled(prompt_length + request["max_new_tokens"])
        elif mode == "assisted":
            settings["assistant_model"] = self._assistant(request["num_speculative_tokens"])
        elif mode == "prompt_lookup":
            settings["prompt_lookup_num_tokens"] = request["num_speculative_tokens"]
            settings["max_matching_ngram_size"] = request["ngram_max"]
        return settings

    def _compiled(self, length: int) -> dict:
        """Return the settings of a static cache and a compiled decoding step."""
        from transformers import CompileConfig

        config = CompileConfig(mode="default")  # "reduce-overhead" would add CUDA graphs
        # Without this flag `generate` compiles on accelerators only.
        config._compile_all_devices = True
        return {"cache_implementation": "static", "max_cache_len": length, "compile_config": config}

    def _assistant(self, num_tokens: int) -> Any:
        """Return the draft model with a fixed K, without a schedule or a confidence threshold."""
        if self.draft is None:
            raise ValueError("mode assisted needs --draft")
        config = self.draft.generation_config
        config.num_assistant_tokens = num_tokens
        config.num_assistant_tokens_schedule = "constant"
        config.assistant_confidence_threshold = 0.0
        return self.draft

    @contextlib.contextmanager
    def _counter(self) -> Iterator[list]:
        """Yield a list that gets an entry for every pass of the target."""
        passes: list[None] = []
        hook = self.target.model.register_forward_pre_hook(lambda *_: passes.append(None))
        try:
            yield passes
        finally:
            hook.remove()


def _ended(rows: list[list[int]], stops: Sequence[int]) -> list[list[int]]:
    """Return the rows up to their stop token; padding follows it."""
    ends = [next((i + 1 for i, token in enumerate(row) if token in stops), None) for row in rows]
    return [row[:end] for row, end in zip(rows, ends, strict=True)]


def serve(load: Callable[[], Any]) -> None:
    """Answer requests until stdin ends, with the worker that ``load`` returns.

    The worker has ``info`` and ``generate``. It is loaded without the settings of JAX. If it cannot
    be loaded, the first reply gives the reason.
    """
    # Output of libraries must not mix with the replies.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    _clean_environment()
    _hide_repository()
    try:
        worker = load()
        _reply(replies, ok=True, **worker.info())
    except Exception as error:  # the client handles failed calls
        traceback.print_exc()
        _reply(replies, ok=False, error=_words(error))
        return
    for line in sys.stdin:
        try:
            _reply(replies, ok=True, **worker.generate(json.loads(line)))
        except Exception as error:
            _reply(replies, ok=False, error=_words(error))


def _reply(replies: TextIO, **fields: Any) -> None:
    replies.write(json.dumps(fields) + "\n")
    replies.flush()


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _clean_environment() -> None:
    for name in [name for name in os.environ if name.startswith(_FOREIGN)]:
        del os.environ[name]
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def _hide_repository() -> None:
    """Remove the repository's root from the path: ``kernels`` is also a package of Hugging Face."""
    root = Path(__file__).resolve().parents[3]
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != root]


def main() -> None:
    """Load the models and serve requests until stdin ends."""
    parser = argparse.ArgumentParser(description="transformers behind a pipe")
    parser.add_argument("--model", required=True)
    parser.add_argument("--draft")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    arguments = parser.parse_args()
    serve(lambda: Worker(arguments.model, arguments.draft, arguments.dtype))


if __name__ == "__main__":
    main()
