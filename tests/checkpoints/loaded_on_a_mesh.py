"""Weights and texts of models that are read by four of eight virtual devices; prints JSON.

Its arguments are a target, a draft head for it, and a GGUF file; or a target, a port and the number
of one of two processes, which have two of the devices each. test_parts.py runs it.
"""

import json
import sys

import jax
import numpy as np

import jspec
from jspec.checkpoints import checkpoint
from jspec.checkpoints.families.names import Entry
from jspec.models import partition
from jspec.sharding import mesh as mesh_lib

WAYS = 4


def bytes_of_parts(path, mesh) -> dict:
    """Load a model on a mesh, compare it with the whole one, and return what this process read."""
    config, plain, _ = checkpoint.load_pretrained(path)
    rules, sizes, part = partition.rules(config, WAYS), [], Entry.part

    def counted(*arguments):
        sizes.append(part(*arguments).nbytes)
        return part(*arguments)

    Entry.part = counted
    shared = checkpoint.load_pretrained(path, sharding=partition.placements(rules, mesh))[1]
    Entry.part = part
    jax.tree.map(check, shared, partition.placed(plain, rules, mesh))
    leaves = jax.tree.leaves(shared)
    held = [{str(each.index): each.data.nbytes for each in x.addressable_shards} for x in leaves]
    return {
        "read": sum(sizes),
        "largest": max(sizes),
        "held": sum(sum(parts.values()) for parts in held),
        "weights": sum(leaf.nbytes for leaf in leaves),
        "largest shard": max(max(parts.values()) for parts in held),
        "largest array": max(leaf.nbytes for leaf in leaves),
    }


def check(one, other):
    assert one.sharding == other.sharding
    for mine, its in zip(one.addressable_shards, other.addressable_shards, strict=True):
        np.testing.assert_array_equal(mine.data, its.data)


def texts(target, head, size, draft_size=1) -> list:
    config = {"method": "eagle3", "model": head, "num_speculative_tokens": 2}
    llm = jspec.LLM(
        target,
        config | {"draft_tensor_parallel_size": draft_size},
        tensor_parallel_size=size,
        max_model_len=64,
        max_num_seqs=2,
    )
    settings = [
        jspec.SamplingParams(temperature=t, seed=4, max_tokens=24, ignore_eos=True)
        for t in (0, 0.8)
    ]
    check_memory(llm)
    outputs = llm.generate(["the quick brown", "def add"], settings)
    return [output.outputs[0].token_ids for output in outputs]


def check_memory(llm) -> None:
    """Compare the memory plan with what each device has."""
    planned, (pool,) = llm.build.memory_plan, llm.runtime.pools
    bytes_of = lambda tree: sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))
    assert planned.weights == bytes_of(llm.build.params.target)
    assert planned.drafter == bytes_of(llm.build.params.drafter)
    (kind,) = pool.blocks.kinds
    assert planned.token * kind.size * kind.num_pages == bytes_of(pool.buffers)
    assert planned.num_tokens == pool.blocks.most_tokens


def main(target: str, head: str, gguf: str):
    if gguf in ("0", "1"):
        jax.distributed.initialize(f"localhost:{head}", 2, int(gguf))
        return print(json.dumps(bytes_of_parts(target, mesh_lib.make(WAYS))))
    mesh = mesh_lib.make(WAYS)
    for path in (target, gguf):
        print(json.dumps(bytes_of_parts(path, mesh)))
    sizes = (1, 1), (WAYS, 1), (WAYS, WAYS)
    return print(json.dumps([texts(target, head, *each) for each in sizes]))


if __name__ == "__main__":
    main(*sys.argv[1:])
