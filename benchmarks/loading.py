"""Host memory of loading: a generated model of 6 GB, read by ``LLM``; prints JSON.

    python -m benchmarks.loading /tmp/model --make       # writes the model
    python -m benchmarks.loading /tmp/model              # one device
    python -m benchmarks.loading /tmp/model --devices 8  # as many virtual devices of a CPU

The weights have the widths of Llama-3.1-8B in bfloat16, and 9 layers. A thread samples the memory
of the process. Pages of mapped files are not in it: they are the cache of the system.
"""

import argparse
import json
import os
import threading
import time
from pathlib import Path

SIZES = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 9,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "eos_token_id": 128001,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
_FILES = 4


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loading")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--make", action="store_true", help="write the model instead")
    parser.add_argument("--devices", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.make:
        return make(arguments.directory)
    count = f"--xla_force_host_platform_device_count={arguments.devices}"
    os.environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": count}
    print(json.dumps(measured(str(arguments.directory), arguments.devices), indent=1))
    return None


def make(directory: Path) -> None:
    """Write config.json, the files of weights, and their index."""
    import ml_dtypes
    import numpy as np

    from jspec.checkpoints import families
    from jspec.checkpoints.files import model_files, safetensors_files

    directory.mkdir(parents=True)
    model_files.write_json(directory / "config.json", SIZES)
    family = families.find(SIZES)
    entries = family.table(family.read(SIZES))
    tensors = [pair for entry in entries for pair in zip(entry.names, entry.shapes, strict=True)]
    block = np.random.default_rng(0).normal(0, 0.02, 2**20 + 1).astype(ml_dtypes.bfloat16)
    index = {}
    for number in range(_FILES):
        part = tensors[number::_FILES]
        file = model_files.SHARD.format(number + 1, _FILES)
        layout = [(name, shape, block.dtype) for name, shape in part]
        values = (np.resize(block, shape) for _, shape in part)
        safetensors_files.write(directory / file, layout, values)
        index |= dict.fromkeys([name for name, _ in part], file)
    model_files.write_json(directory / model_files.INDEX, {"metadata": {}, "weight_map": index})


def measured(directory: str, devices: int) -> dict[str, float]:
    """Return MB of the weights, of the largest array, and of the peak beyond the weights."""
    import jax

    import jspec

    jax.block_until_ready(jax.numpy.zeros(8) + 1)
    before, peaks, done = resident(), [], threading.Event()

    def sample() -> None:
        while not done.wait(0.002):
            peaks.append(resident())

    sampler = threading.Thread(target=sample)
    sampler.start()
    begin = time.perf_counter()
    llm = jspec.LLM(
        directory,
        tensor_parallel_size=devices,
        max_model_len=128,
        max_num_seqs=1,
        num_gpu_blocks_override=2,
    )
    seconds = time.perf_counter() - begin
    done.set()
    sampler.join()
    sizes = sorted(leaf.nbytes for leaf in jax.tree.leaves(llm.build.params))
    return {
        "devices": devices,
        "weights": round(sum(sizes) / 1e6),
        "largest array": round(sizes[-1] / 1e6),
        "peak beyond the weights": round((max(peaks) - before - sum(sizes)) / 1e6),
        "seconds": round(seconds, 1),
    }


def resident() -> int:
    """Return the bytes of the process that are in no file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (kilobytes,) = [line.split()[1] for line in lines if line.startswith("RssAnon:")]
    return 1024 * int(kilobytes)


if __name__ == "__main__":
    main()
