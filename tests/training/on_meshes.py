"""Train the toy task on several meshes of 8 virtual devices; print a line of JSON for each."""

import json
import sys
from pathlib import Path

import jax

from tests.training import toy
from training import trainer
from training.data import batches, held_out
from training.pretrain import LanguageModel, ModelSettings
from training.trainer.mesh import make_mesh, shard
from training.trainer.metrics import read_log

ONE, SPREAD, CUT, ALL_AXES = (1, 1, 1), (8, 1, 1), (1, 4, 2), (2, 2, 2)
MODEL = ModelSettings(
    vocab_size=257,
    hidden_size=32,
    intermediate_size=64,
    layers=1,
    heads=2,
    kv_heads=1,
    head_dim=16,
    max_positions=64,
)


def shards(tree) -> list:
    """Return the global shape and the shape on a device of every leaf."""
    return [[leaf.shape, leaf.addressable_shards[0].data.shape] for leaf in jax.tree.leaves(tree)]


def train(task, frozen, mesh: tuple[int, int, int], out: Path, **options) -> dict:
    data, fsdp, tensor = mesh
    settings = toy.settings(
        batch=16, steps=6, eval_every=6, data_parallel=data, fsdp=fsdp, tensor=tensor, **options
    )
    apart = held_out(toy.Rows(seed=1), batch=8, limit=24)
    result = trainer.train(
        task,
        frozen,
        batches(toy.Rows(), batch=16, seed=0),
        settings,
        out=out,
        held_out=() if mesh == SPREAD else apart,
    )
    log = read_log(out / "metrics.jsonl")
    return {
        "mesh": mesh,
        "losses": [entry["loss"] for entry in log],
        "heldout_loss": log[-1].get("heldout_loss"),
        "params": shards(result.params),
        "frozen": shards(shard(frozen, make_mesh(settings))),
    }


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for mesh in (ONE, SPREAD, CUT):
        task = toy.Bigrams()
        print(json.dumps(train(task, toy.FROZEN, mesh, folder / f"toy{mesh}")), flush=True)
    for mesh in (ONE, ALL_AXES):
        task = LanguageModel(MODEL.config(), "bfloat16")
        print(json.dumps(train(task, (), mesh, folder / f"model{mesh}")), flush=True)
    # A run that began on one device resumes with split weights.
    print(json.dumps(train(toy.Bigrams(), toy.FROZEN, CUT, folder / f"toy{ONE}")), flush=True)
