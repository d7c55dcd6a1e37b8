"""Losses of DFlash and DSpark heads, block by block, against plain torch and numpy."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.checkpoints.heads import head_files
from jspec.core import trees
from jspec.models import decoder
from jspec.models.decoder import Decoder
from jspec.models.heads import dflash
from jspec.models.heads.dflash import DFlashConfig
from jspec.models.heads.dspark import SparkConfig
from tests import networks
from tests.training import texts
from tests.training.texts import FIRST, SECOND, log_softmax
from training.networks import attention
from training.networks.forward import Frozen
from training.tasks.dflash import PUBLISHED, DFlashTask, Recipe, draw_blocks, row_weights

TARGET = networks.small()
NETWORK = networks.changed(TARGET, num_layers=1, qk_norm=True)
PLAIN = DFlashConfig(
    networks.changed(NETWORK, num_layers=2, windows=(4, None)),
    (0, 1),
    32,
    40,
    4,
    39,
    causal=(True, False),
)
VOCABULARY = np.arange(3, 40, 2, dtype=np.int32)
REDUCED = DFlashConfig(
    dataclasses.replace(NETWORK, vocab_size=len(VOCABULARY)),
    (1,),
    32,
    40,
    4,
    39,
    separate_head=True,
    separate_embedding=True,
)
SPARK = DFlashConfig(
    networks.changed(NETWORK, windows=(4,)),
    (1,),
    32,
    40,
    4,
    39,
    causal=(True,),
    from_anchor=True,
    spark=SparkConfig(6, "rnn", True, True),
)
RECIPES = {
    "dflash": (PLAIN, dataclasses.replace(PUBLISHED["dflash"], anchors=7, gamma=2.0)),
    "dpace, reduced": (REDUCED, Recipe(anchors=30, weighing="dpace")),
    "dspark": (SPARK, dataclasses.replace(PUBLISHED["dspark"], anchors=5)),
}


@pytest.fixture(scope="module")
def target():
    return networks.loud(decoder.init_params(jax.random.key(0), TARGET))


@pytest.fixture(scope="module")
def batch():
    return texts.packed(TARGET.vocab_size)


def loud(params):
    return jax.tree.map(
        lambda x: 0.3 * jax.random.normal(jax.random.key(x.size), x.shape),
        params.replace(draft_to_target=None),
    )


def heads_in_torch(directory, config, params, target):
    """The head in plain torch, from the file that jspec writes."""
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    from tests.models.torch_dflash import DFlashRef, DSparkRef

    layout = "dflash-speculators" if config.separate_head else "dflash"
    head_files.save_head(
        directory, config, params, TARGET, layout=layout, target_name="someone/model"
    )
    lent = (torch.tensor(np.asarray(x)) for x in (target.embedding, target.head.T))
    raw = json.loads((directory / "config.json").read_text())
    kind = DFlashRef if config.spark is None else DSparkRef
    return kind(load_file(directory / "model.safetensors"), raw, *lent)


def rows_of(config, reference, states, before):
    """Return logits [K, Vd] of a block in torch, and guessed probabilities [K] if there are any."""
    import torch

    states, depth = torch.tensor(np.stack(states, 1)), config.max_depth
    with torch.inference_mode():
        if config.spark is None:
            return reference.draft_logits(states, before[0], depth).numpy(), None
        logits = reference.path_logits(states, before, depth).numpy()
        return logits, reference.confidences(states, before, depth).numpy()


def shares(recipe, likely, counts):
    """Return the weights of a block's rows, by the formulas."""
    depth = len(likely)
    if recipe.weighing == "decay":
        weights = np.exp(-np.arange(depth) / recipe.gamma)
        return weights / weights.sum()
    weights, alpha = np.zeros(depth), recipe.dpace_alpha
    for row in range(depth):
        for last in range(row, depth):
            passed = [(1 - alpha) * likely[i] + alpha for i in range(last + 1) if counts[i] > 0]
            weights[row] += np.prod(passed) * (counts[last] > 0)
    return weights / (depth * (depth + 1) / 2)


def block_loss(recipe, logits, chances, truth, labels, counts, vocabulary):
    """Return the loss of one block."""
    log_q = log_softmax(logits)
    ids = list(range(40) if vocabulary is None else vocabulary)
    known = np.array([label in ids for label in labels])
    columns = [ids.index(label) if label in ids else 0 for label in labels]
    likely = log_q[np.arange(len(labels)), columns]
    value = -recipe.label_weight * known * likely
    p, q = np.exp(log_softmax(truth)[:, ids]), np.exp(log_q)
    overlap = np.minimum(p, q).sum(-1)
    value = value + recipe.loss_weight * (1 - overlap)
    if chances is not None:
        cross = -(overlap * np.log(chances) + (1 - overlap) * np.log(1 - chances))
        value = value + recipe.confidence_weight * cross
    return (counts * shares(recipe, known * np.exp(likely), counts) * value).sum()


@pytest.mark.parametrize(
    "name",
    [
        "dspark",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("dflash", "dpace, reduced")),
    ],
)
def test_the_loss_is_that_of_every_block_alone(name, target, batch, tmp_path, monkeypatch):
    monkeypatch.setattr(attention, "QUERY_BLOCK", 8)  # two blocks at a time, with one left over
    config, recipe = RECIPES[name]
    vocabulary = jnp.asarray(VOCABULARY) if config.reduced else None
    params, key = loud(dflash.init_params(jax.random.key(2), config)), jax.random.key(3)
    task = DFlashTask(config, TARGET, recipe, compute="float32")
    got, metrics = jax.jit(task.loss)(params, Frozen(target, None, vocabulary), batch, key)
    blocks = draw_blocks(batch, key, recipe.anchors, config.max_depth)
    served = params.replace(draft_to_target=vocabulary)
    reference = heads_in_torch(tmp_path, config, served, target)
    module, total = Decoder(TARGET), 0.0
    forward = jax.jit(module.forward, static_argnums=4)
    for row, anchors in enumerate(np.asarray(blocks.anchors)):
        for block, anchor in enumerate(anchors):
            counts = np.asarray(blocks.weights[row, block])
            if not counts.any():
                continue
            start = FIRST * int(anchor >= FIRST)
            text = batch.tokens[row, start : FIRST if start == 0 else FIRST + SECOND]
            chain = trees.from_parents(trees.chain(len(text) - 1), len(text) - 1)
            out = forward(target, text[None], chain, module.init_cache(1, 0), config.capture_layers)
            states = [np.asarray(x[0, : anchor - start]) for x in out.features]
            before, labels = (
                np.asarray(x[row, block]).tolist() for x in (blocks.before, blocks.labels)
            )
            logits, chances = rows_of(config, reference, states, before)
            rows = np.minimum(anchor - start + np.arange(config.max_depth), len(text) - 1)
            truth = np.asarray(out.logits[0])[rows]
            total += block_loss(recipe, logits, chances, truth, labels, counts, vocabulary)
    np.testing.assert_allclose(got, total / blocks.anchors.size, rtol=5e-5)
    assert 0 < metrics["likely_0"].mean < 1


def test_blocks_begin_where_something_is_before_and_the_next_token_is_learned(batch):
    learned = batch.weights * (batch.segments > 0)
    for key in range(5):
        blocks = draw_blocks(batch, jax.random.key(key), 6, 3)
        for row, anchors in enumerate(np.asarray(blocks.anchors)):
            assert len(set(anchors)) == 6
            for block, anchor in enumerate(anchors):
                assert batch.segments[row, anchor - 1] == batch.segments[row, anchor + 1] > 0
                tokens = batch.tokens[row, anchor : anchor + 4].tolist()
                before, labels = blocks.before[row, block], blocks.labels[row, block]
                assert [before[0], *labels][: len(tokens)] == tokens
                same = batch.segments[row, anchor + 1 :][:3] == batch.segments[row, anchor]
                expected = np.cumprod(learned[row, anchor + 1 :][:3] * same)
                assert blocks.weights[row, block, : len(expected)].tolist() == expected.tolist()
                assert not blocks.weights[row, block, len(expected) :].any()
    few = draw_blocks(batch, jax.random.key(0), 100, 3)
    assert few.anchors.shape == (2, FIRST + SECOND + 1)
    assert not few.weights[:, -3:].any()  # there are no more candidates


def test_dpace_weighs_a_row_by_the_expected_tokens_from_it_on():
    recipe = Recipe(weighing="dpace", dpace_alpha=0.0)
    likely, counts = jnp.asarray([0.5, 0.4, 0.9]), jnp.ones(3)
    weights = row_weights(recipe, likely, counts) * 6
    np.testing.assert_allclose(weights, [0.5 + 0.2 + 0.18, 0.2 + 0.18, 0.18], rtol=1e-6)


def test_a_separate_output_matrix_begins_as_the_targets(target):
    task = DFlashTask(REDUCED, TARGET, Recipe())
    params = task.init(jax.random.key(0), Frozen(target, None, jnp.asarray(VOCABULARY)))
    np.testing.assert_array_equal(params.head, target.head[:, VOCABULARY])


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("anchors", 0, "--anchors 0 does not work; it must be at least 1"),
        ("gamma", -1.0, "--gamma -1.0 does not work; it must be at least 0"),
        ("dpace_alpha", 1.5, "--dpace-alpha 1.5 does not work; take 0 to 1"),
        ("weights", (0, 0), "--label-weight 0.0 does not work; give it or --loss-weight a value"),
        ("loss", "hinge", "--loss 'hinge' does not work; choose one of"),
    ],
)
def test_a_recipe_out_of_range_is_refused(field, value, message):
    changes = {field: value}
    if field == "weights":
        changes = {"label_weight": value[0], "loss_weight": value[1]}
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(PUBLISHED["dspark"], **changes)
