"""Kernels of several devices, each on its own heads; prints one JSON per case.

tests/kernels/test_on_a_mesh.py runs this in a process where one CPU simulates eight devices.
"""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np

import jspec
from jspec import ops
from jspec.models.blocks import experts
from jspec.models.blocks.experts import Experts
from jspec.sharding import mesh
from tests import on_a_mesh
from tests.kernels.attention import in_pages, random_case

DEVICES = 4
INTERPRETED = "pallas_tpu_interpreted"
# Query heads, key heads, sliding window, and whether the heads are split: with one key head all
# devices have the keys, as of latent attention. The windowed ones have sinks.
CASES = {
    "standard": (8, 4, None, True),
    "windowed": (8, 4, 9, True),
    "latent": (8, 1, None, True),
    "a drafter that is whole": (6, 2, None, False),
}


def difference(name: str, page: int | None) -> dict[str, float]:
    """Return the largest difference from one device's result, and the heads that a device has."""
    heads, kv_heads, window, is_split = CASES[name]
    arrays, options = random_case(
        heads,
        kv_heads,
        8,
        9,
        9,
        40,
        [0, 21, 40],
        window=window,
        has_sinks=window is not None,
    )
    if page is not None:
        arrays, options["table"] = in_pages(arrays, page)
    attend = functools.partial(ops.attention, **options, scale=0.3, is_split=is_split)
    expected = attend(*arrays.values(), implementation="reference")
    kernel = jax.jit(functools.partial(attend, implementation=INTERPRETED))
    with mesh.on(mesh.make(DEVICES)):
        result = kernel(*map(jnp.asarray, arrays.values()))
    part = result.sharding.shard_shape(result.shape)[1]
    return {"difference": float(np.abs(result - expected).max()), "heads": part}


def texts(devices: int, method: str) -> list[list[int]]:
    """Return greedy and drawn tokens, with kernels for target and drafter."""
    llm = jspec.LLM(
        on_a_mesh.target("standard"),
        on_a_mesh.config(method, devices) | {"attention_backend": INTERPRETED},
        max_num_seqs=2,
        max_model_len=64,
        block_size=8,
        tensor_parallel_size=devices,
        attention_backend=INTERPRETED if devices > 1 else "xla",
    )
    common = {"max_tokens": 20, "detokenize": False, "ignore_eos": True}
    settings = [
        jspec.SamplingParams(temperature=0, **common),
        jspec.SamplingParams(temperature=0.8, top_p=0.95, seed=3, **common),
    ]
    outputs = llm.generate([{"prompt_token_ids": list(range(3, 14))}] * 2, settings)
    return [list(output.outputs[0].token_ids) for output in outputs]


def of_experts() -> float:
    """Return the largest difference of a mixture whose columns each device multiplies itself."""
    sizes = Experts(6, 2, 64 * DEVICES, expert_bias=True, matmul="pallas_gpu")
    params = sizes.init(jax.random.split(jax.random.key(0)), 64, jnp.bfloat16)
    params = jax.tree.map(lambda x: 20 * (x + 0.01 * jnp.cos(jnp.arange(x.shape[-1]))), params)
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    x = jax.random.normal(jax.random.key(1), (9, 64))
    expected = experts.mixture(params, sizes, x, implementation="blocks")
    (order,) = (t.parts(DEVICES) for t in sizes.tensors(64) if t.path == ("gate_up",))
    params = params.replace(
        gate_up=params.gate_up[..., order], gate_up_bias=params.gate_up_bias[..., order]
    )
    mixture = jax.jit(experts.mixture, static_argnums=1)
    with mesh.on(mesh.make(DEVICES)):
        result = mixture(params, sizes.split(DEVICES), x)
    return float(np.abs(result - expected).max() / np.abs(expected).max())


def main():
    print(json.dumps({"experts": of_experts()}))
    for name in CASES:
        for page in (None, 8):
            print(json.dumps({"case": [name, page], **difference(name, page)}))
    print(json.dumps({"one": texts(1, "eagle3"), "several": texts(DEVICES, "eagle3")}))


if __name__ == "__main__":
    main()
