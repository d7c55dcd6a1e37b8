"""Rows that count in the losses of every network that guesses ahead."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny
from tests.drafters import dflashes, heads, hydras, mtps, peagle, speculators
from training.data.batch import Batch
from training.losses import guesses
from training.losses.slots import SlotRecipe
from training.networks.forward import Frozen
from training.tasks.dflash import PUBLISHED as DFLASH_PUBLISHED
from training.tasks.dflash import DFlashTask
from training.tasks.draft import DraftRecipe, DraftTask, ParallelDraftTask
from training.tasks.eagle_task import PARALLEL, PUBLISHED, EagleTask, ParallelEagleTask
from training.tasks.medusa import MedusaRecipe, MedusaTask
from training.tasks.mtp import MtpRecipe, MtpTask
from training.tasks.stages import StagesRecipe, StagesTask
from training.trainer.task import Ratio

TARGET = tiny.TARGET.config
EVERY = SlotRecipe(depths=2, retention=1.0)

# A window of two conversations: the user's tokens are 0-3, 7-9 and 10. The answers are 4-6, where 6
# ends the turn, and 11-14, which the window cuts off. A second window has one, and padding.
ANSWERED = np.zeros((2, 15), np.float32)
ANSWERED[0, [4, 5, 6, 11, 12, 13, 14]] = ANSWERED[1, [2, 3, 4]] = 1
SEGMENTS = np.array([[1] * 10 + [2] * 5, [1] * 5 + [0] * 10], np.int32)
CHAT = Batch(np.arange(30, dtype=np.int32).reshape(2, 15), SEGMENTS, ANSWERED)


def eagle_task(variant: str) -> EagleTask:
    config = heads.CONFIGS["eagle3" if variant == "eagle3" else "eagle"]
    recipe = dataclasses.replace(PUBLISHED[variant], unroll=2, noise=0.0)
    return EagleTask(dataclasses.replace(config, fc_bias=False), TARGET, recipe, "float32")


def staged(config) -> StagesTask:
    return StagesTask(config, TARGET, StagesRecipe(), "float32")


TASKS = {
    "eagle1": lambda: eagle_task("eagle1"),
    "hass": lambda: eagle_task("hass"),
    "eagle3": lambda: eagle_task("eagle3"),
    "p-eagle": lambda: ParallelEagleTask(peagle.CONFIG, TARGET, PARALLEL, "float32", slots=EVERY),
    "medusa": lambda: MedusaTask(heads.CONFIGS["medusa"], TARGET, MedusaRecipe(), False, "float32"),
    "hydra": lambda: staged(hydras.CONFIGS["mlp"]),
    "mlp speculator": lambda: staged(speculators.CONFIGS["tied"]),
    "mtp": lambda: MtpTask(mtps.CONFIGS["one"], TARGET, MtpRecipe(unroll=2), "float32"),
    "pard": lambda: ParallelDraftTask(
        tiny.DRAFT_CONFIG, TARGET, DraftRecipe(), "float32", slots=EVERY, mask_token_id=63
    ),
}
OTHERS = {
    "draft": lambda: DraftTask(tiny.DRAFT_CONFIG, TARGET, DraftRecipe(), "float32"),
    "dspark": lambda: DFlashTask(
        dflashes.CONFIGS["vanilla"], TARGET, DFLASH_PUBLISHED["dspark"], "float32"
    ),
}


def weights_of(task):
    """Return initial weights, and weights that are not trained."""
    target = tiny.params().target
    frozen = Frozen(target, tiny.params().drafter if isinstance(task, DraftTask) else None)
    if isinstance(task, EagleTask) and task.head.reduced:
        frozen = frozen.replace(draft_to_target=jnp.arange(heads.REDUCED_SIZE))
    return task.init(jax.random.key(0), frozen), frozen


def counted(name: str, monkeypatch) -> list[list[set[int]]]:
    """Return the tokens of each window about which the first and the second guess count."""

    # The network is dead code, because only the rows of the target are returned.
    def rows_of(score, x, matrices, fixed, *, rows):
        return {"loss": jnp.float32(0), "rows": fixed._replace(states=None)}

    monkeypatch.setattr(guesses, "mean_by_chunks", rows_of)
    task = TASKS[name]()
    params, frozen = weights_of(task)
    rows = jax.jit(task.loss)(params, frozen, CHAT, jax.random.key(0))[1]["rows"]
    places = rows.labels - 15 * np.arange(2)[:, None]  # a token's number is its place
    about = np.where(rows.weights > 0, places[..., None], -1)
    depths = np.asarray(rows.depths)
    return [
        [set(window[k == step].tolist()) - {-1} for step in range(2)]
        for window, k in zip(about, depths, strict=True)
    ]


@pytest.mark.parametrize("name", TASKS)
def test_the_guesses_that_count_are_about_tokens_of_answers_and_no_others(name, monkeypatch):
    """The first guess of a request predicts the first token of its answer: it counts.

    A feature comes with the token behind it, so heads guess from a text's third token on.
    """
    first, second = counted(name, monkeypatch)
    if name == "pard":
        assert first == [{4, 5, 6, 11, 12, 13, 14}, {4, 5, 6, 12, 13, 14}]
        assert second == [{2, 3, 4}, {2, 3, 4}]
    else:
        assert first == [{4, 5, 6, 12, 13, 14}, {4, 5, 6, 13, 14}]
        assert second == [{2, 3, 4}, {3, 4}]


@pytest.mark.parametrize("name", (*TASKS, *OTHERS))
def test_metrics_of_micro_batches_add_up_to_those_of_the_batch(name):
    """The parts have different numbers of rows that count."""
    task = (TASKS | OTHERS)[name]()
    given = weights_of(task)
    compute = jax.jit(lambda batch: task.loss(*given, batch, jax.random.key(0)))
    part = lambda row: jax.tree.map(lambda x: np.stack([x[row], x[row]]), CHAT)
    whole, first, second = compute(CHAT), compute(part(0)), compute(part(1))
    chex.assert_trees_all_close(
        whole, jax.tree.map(lambda a, b: (a + b) / 2, first, second), rtol=2e-5, atol=1e-7
    )
    ratios = [x for x in whole[1].values() if isinstance(x, Ratio)]
    assert len(ratios) >= 2 and all(x.mean > 0 for x in ratios if x.count)
    assert any(x.count and x.mean < 1 for x in ratios)
