"""Products with the parts of a quantised matrix on four virtual devices; prints JSON.

test_quantized_matmul_on_a_mesh.py runs it. The reference stands for the kernel.
"""

import collections
import json
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import jspec
from jspec import ops
from jspec.api.build import build_plan
from jspec.api.config import read
from jspec.checkpoints.loading import LoadedModel
from jspec.checkpoints.quantised import on_the_fly
from jspec.core.quantized import SCHEMES, Factors, Quantized, quantize
from jspec.core.weights import Transposed
from jspec.engine.profile import Profile
from jspec.models import decoder, partition
from jspec.models.quantised import ForKernel
from jspec.sharding import COLUMNS, ROWS, mesh
from jspec.sharding.placement import Placement
from tests import networks, on_a_mesh, program_size

WAYS = 4
DIVISIONS = {"outputs": COLUMNS, "inputs": ROWS, "none": PartitionSpec()}
COLLECTIVE = re.compile(r" (all-reduce|all-gather|collective-permute|all-to-all|reduce-scatter)\(")
NETWORK = networks.changed(
    on_a_mesh.STANDARD, hidden_size=128, intermediate_size=512, head_dim=16, num_kv_heads=4
)


def by_reference(weight):
    """Return a matrix in the form of a kernel, which the reference multiplies."""
    is_swapped = isinstance(weight, Transposed)
    stored = weight.stored if is_swapped else weight
    if not isinstance(stored, Quantized):
        return weight
    fields = {name: getattr(stored, name) for name in Quantized.__dataclass_fields__}
    made = ForKernel(**fields, implementation="reference")
    return Transposed(made) if is_swapped else made


def matrix(scheme: str, *, zeros: bool = False, minima: bool = False, for_tpu: bool = False):
    weight = 0.1 * jax.random.normal(jax.random.key(0), (1024, 256))
    made = quantize(weight.astype(jnp.bfloat16), SCHEMES[scheme], swapped=not for_tpu)
    if for_tpu:
        made = made.replace(minima=made.scales)
    if zeros:
        shape = made.stored.scales.inner.shape
        drawn = jax.random.randint(jax.random.key(1), shape, -8, 8).astype(jnp.bfloat16)
        made = Transposed(made.stored.replace(zeros=drawn))
    if minima:
        factors = Factors(made.stored.scales.inner, made.stored.scales.inner[:, ::2])
        made = Transposed(made.stored.replace(scales=factors, minima=factors))
    return by_reference(made)


def products():
    """Yield the products of parts beside those of whole matrices, and their collectives."""
    devices = mesh.make(WAYS)
    int4 = {"scheme": "int4"}
    more = ({"zeros": True}, {"minima": True}, {"for_tpu": True})
    for case in (int4, *(int4 | each for each in more), {"scheme": "fp8"}):
        weight = matrix(**case)
        # XLA for CPUs rounds a matrix [I, O] that it multiplies out for many rows, or not.
        for rows in (5,) if "for_tpu" in case else (5, 200):
            x = jax.random.normal(jax.random.key(2), (rows, 1024)).astype(jnp.bfloat16)
            expected = np.asarray(ops.linear(x, weight))
            for name, spec in DIVISIONS.items():
                part = partition.put_at(Placement(NamedSharding(devices, spec)), weight)
                with mesh.on(devices):
                    program = jax.jit(ops.linear)
                    text = program.lower(x, part).compile().as_text()
                    error = np.abs(program(x, part) - expected).max() / np.abs(expected).max()
                found = collections.Counter(COLLECTIVE.findall(text))
                yield dict(case, rows=rows, divided=name, error=float(error), collectives=found)


def narrow(leaf):
    """Return a matrix in int4; a vector as it is."""
    is_matrix = leaf.ndim == 2
    return by_reference(quantize(leaf, SCHEMES["int4"], swapped=True)) if is_matrix else leaf


def model(quantised: bool) -> LoadedModel:
    params = on_a_mesh.loud(0, decoder.init_params, NETWORK)
    if quantised:
        params = params.replace(layers=jax.tree.map(narrow, params.layers))
    return LoadedModel(on_a_mesh.directory(), NETWORK, params, {})


def collectives(quantised: bool) -> dict[str, int]:
    """Return the collectives of a launch of two devices."""
    devices = mesh.make(2)
    with mesh.on(devices):
        build = build_plan(model(quantised), read(on_a_mesh.METHODS["ngram"]), mesh=devices)
        compiled = program_size.lowered(build.plan, build.params, Profile()).compile()
    return collections.Counter(COLLECTIVE.findall(compiled.as_text()))


def texts(size: int) -> list[list[int]]:
    llm = jspec.LLM(
        model(quantised=True),
        on_a_mesh.METHODS["ngram"],
        tensor_parallel_size=size,
        max_num_seqs=2,
        max_model_len=64,
    )
    settings = jspec.SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
    answers = llm.generate([[1, 2, 3, 4, 1, 2, 3], [5, 6, 7]], settings)
    return [list(each.outputs[0].token_ids) for each in answers]


def on_the_fly_for_hopper() -> list:
    """Return how matrices that are quantised for two Hopper GPUs are stored."""
    gpu = SimpleNamespace(compute_capability="9.0", device_kind="NVIDIA H200")
    backend, devices = jax.default_backend, jax.devices
    placed = Placement(NamedSharding(mesh.make(2), ROWS))
    entry = SimpleNamespace(transpose=True, float32=False, path=("layers", 0, "mixer", "output"))
    matrices = [0.1 * jnp.ones((256, outputs), jnp.bfloat16) for outputs in (128, 96)]
    try:
        jax.default_backend, jax.devices = (lambda: "gpu"), (lambda: [gpu])
        made = [on_the_fly.quantised(entry, x, SCHEMES["int4"], placed) for x in matrices]
    finally:
        jax.default_backend, jax.devices = backend, devices
    parts = [x.values if isinstance(x, Quantized) else x.stored.values for x in made]
    return [
        [
            type(x).__name__,
            list(part.sharding.spec),
            np.array_equal(x.array(), quantize(matrix, SCHEMES["int4"]).array()),
        ]
        for x, part, matrix in zip(made, parts, matrices, strict=True)
    ]


def main():
    for line in products():
        print(json.dumps(line), flush=True)
    print(json.dumps({"stored": on_the_fly_for_hopper()}))
    print(json.dumps({"texts": [texts(1), texts(2)]}))
    print(json.dumps({"collectives": [collectives(quantised=each) for each in (False, True)]}))


if __name__ == "__main__":
    main()
