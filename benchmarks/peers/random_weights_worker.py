"""jspec or transformers with the same random weights, which are made in memory.

    python benchmarks/peers/random_weights_worker.py --program transformers --model DIR

DIR has a config.json alone. A tensor's values depend on its name and its shape, so both programs
get the same ones without a file. The protocol is that of ``jspec.tools.bench.peer_transformers``;
the modes of jspec are ``plain`` and ``ngram``.
"""

import argparse
import contextlib
import functools
import os
import sys
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

_ROOT = str(Path(__file__).resolve().parents[2])
sys.path.insert(0, _ROOT)  # transformers' environment has no jspec; ``serve`` removes it again

from jspec.tools.bench import peer_transformers  # noqa: E402

_NUM_DRAWN = 4_194_301  # a prime number, so that rows of a matrix differ


@functools.cache
def _drawn() -> np.ndarray:
    return np.random.default_rng(0).standard_normal(_NUM_DRAWN, np.float32)


def values(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return the values of a tensor before they repeat, float32 [V]: ones for a vector."""
    if len(shape) == 1:
        return np.ones(1, np.float32)
    return np.roll(_drawn(), zlib.crc32(name.encode())) * np.float32(shape[-1] ** -0.5)


class Jspec:
    """``LLM`` with its defaults, one for each mode; all have the same weights."""

    def __init__(self, settings: argparse.Namespace):
        if settings.memory_share:
            os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = str(settings.memory_share)
        import jax

        from jspec.checkpoints import checkpoint, families
        from jspec.checkpoints.families.names import assemble
        from jspec.checkpoints.loading import LoadedModel

        self._device = jax.devices()[0].device_kind
        config, raw = checkpoint.load_config(settings.model)
        entries, dtype = families.find(raw).table(config), jax.numpy.dtype(raw["dtype"])

        def array(entry: Any) -> Any:
            parts = zip(entry.names, entry.shapes, strict=True)
            tensors = {
                name: np.resize(values(name, shape).astype(dtype), shape) for name, shape in parts
            }
            return entry.read(tensors, dtype)

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            arrays = list(pool.map(array, entries))
        self._target = LoadedModel(settings.model, config, assemble(config, entries, arrays), raw)
        self._llms: dict[str, Any] = {}

    def info(self) -> dict[str, Any]:
        """Return the device."""
        return {"device": self._device}

    def generate(self, request: dict[str, Any]) -> dict[str, Any]:
        """Time one call of ``generate``."""
        import jspec

        llm = self._llm(request)
        params = jspec.SamplingParams(
            temperature=request["temperature"],
            max_tokens=request["max_new_tokens"],
            ignore_eos=True,
            detokenize=False,
        )
        prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
        begin, cpu = time.perf_counter(), time.process_time()
        outputs = llm.generate(prompts, params)
        seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
        tokens = [output.outputs[0].token_ids for output in outputs]
        a_pass = [output.speculative_decoding_stats["tokens_per_pass"] for output in outputs]
        passes = sum(len(ids) / per for ids, per in zip(tokens, a_pass, strict=True))
        return {
            "tokens": tokens,
            "seconds": seconds,
            "cpu_seconds": cpu,
            "passes": round(passes),
        }

    def _llm(self, request: dict[str, Any]) -> Any:
        import jspec

        mode = request["mode"]
        if mode not in self._llms:
            config = None
            if mode == "ngram":
                config = {
                    "method": mode,
                    "num_speculative_tokens": request["num_speculative_tokens"],
                    "prompt_lookup_max": request["ngram_max"],
                }
            self._llms[mode] = jspec.LLM(self._target, config)
        return self._llms[mode]


class Transformers(peer_transformers.Worker):
    """transformers on one device."""

    def __init__(self, settings: argparse.Namespace):
        from transformers import AutoConfig

        self._device, self._length = settings.device, settings.length
        dtype = AutoConfig.from_pretrained(settings.model).dtype
        super().__init__(settings.model, None, str(dtype).removeprefix("torch."))

    def info(self) -> dict[str, Any]:
        """Return versions and the device."""
        on_gpu = self._device == "cuda"
        name = self.torch.cuda.get_device_name() if on_gpu else "cpu"
        return super().info() | {"device": name}

    def _load(self, path: str, dtype: str) -> Any:
        """Return the model of a config with the weights of ``values``."""
        from transformers import AutoConfig, AutoModelForCausalLM

        torch, kind = self.torch, getattr(self.torch, dtype)
        with torch.device(self._device), torch.no_grad():
            config = AutoConfig.from_pretrained(path)
            model = AutoModelForCausalLM.from_config(config, dtype=kind).eval()
            for name, weight in model.named_parameters():
                first = torch.from_numpy(values(name, tuple(weight.shape)))
                first = first.to(self._device, kind)
                copies = -(-weight.numel() // len(first))
                weight.copy_(first.repeat(copies)[: weight.numel()].view(weight.shape))
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0
        return model

    def _batch(self, prompts: list[list[int]]) -> tuple[Any, Any]:
        """Return token ids and attention mask on the device."""
        return tuple(each.to(self._device) for each in super()._batch(prompts))

    def _compiled(self, length: int) -> dict[str, Any]:
        """Return the settings of a static cache of one length for all calls.

        A GPU has transformers' own settings of torch.compile, which include CUDA graphs.
        """
        compiled = super()._compiled(max(length, self._length))
        if self._device == "cuda":
            del compiled["compile_config"]
        return compiled


def main() -> None:
    """Make the weights and serve requests until stdin ends."""
    parser = argparse.ArgumentParser(description="a program with random weights behind a pipe")
    parser.add_argument("--program", choices=("jspec", "transformers"), required=True)
    parser.add_argument("--model", required=True, help="a folder with a config.json")
    parser.add_argument("--device", default="cpu", help="of torch; JAX has its own default")
    parser.add_argument("--length", type=int, default=0, help="least tokens of a static cache")
    parser.add_argument("--memory-share", type=float, help="of the device, for JAX")
    settings = parser.parse_args()
    if settings.program == "transformers":
        peer_transformers.serve(lambda: Transformers(settings))
        return
    # ``serve`` removes the settings of JAX, which counts for torch alone.
    with contextlib.redirect_stdout(sys.stderr):
        worker = Jspec(settings)
    peer_transformers.serve(lambda: worker)


if __name__ == "__main__":
    main()
