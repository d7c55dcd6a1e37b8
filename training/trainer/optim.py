"""Learning-rate schedules and optimisers by name."""

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers, muon

from training.trainer.settings import TrainerSettings


def make_schedule(settings: TrainerSettings) -> optax.Schedule:
    """Learning rate by step: a linear warm-up, then what ``settings.schedule`` names.

    ``cosine`` and ``linear`` fall to ``learning_rate_floor`` of the peak at ``steps``. ``wsd``
    (warm-up, stable, decay: arXiv 2405.18392) holds the peak and falls linearly to zero over the
    last ``decay`` steps: until the fall starts it does not depend on ``steps``, so a run may be
    resumed with another length; nor does ``constant`` ever.
    """
    peak, warmup, steps = settings.learning_rate, settings.warmup, settings.steps
    rising = optax.linear_schedule(0.0, peak, warmup)
    falling = max(steps - warmup, 1)
    if settings.schedule == "cosine":
        parts = [optax.cosine_decay_schedule(peak, falling, settings.learning_rate_floor)]
    elif settings.schedule == "linear":
        parts = [optax.linear_schedule(peak, settings.learning_rate_floor * peak, falling)]
    elif settings.schedule == "wsd":
        parts = [optax.constant_schedule(peak), optax.linear_schedule(peak, 0.0, settings.decay)]
    else:
        parts = [optax.constant_schedule(peak)]
    borders = [warmup, max(warmup, steps - settings.decay)][: len(parts)]
    return optax.join_schedules([rising, *parts], borders)


def make_optimizer(settings: TrainerSettings) -> optax.GradientTransformation:
    """``adamw``, or ``muon`` for the matrices inside the blocks with AdamW for all the rest.

    Muon (arXiv 2502.16982) scales its updates to AdamW's usual size, so both take one learning
    rate. Only matrices decay; vectors, embeddings and output matrices do not.
    """
    schedule = make_schedule(settings)
    if settings.optimizer == "muon":
        optimizer = muon(
            schedule,
            weight_decay=settings.weight_decay,
            consistent_rms=0.2,
            adam_b1=settings.beta1,
            adam_b2=settings.beta2,
            muon_weight_dimension_numbers=_muon_leaves,
        )
    else:
        optimizer = optax.adamw(
            schedule,
            b1=settings.beta1,
            b2=settings.beta2,
            weight_decay=settings.weight_decay,
            mask=hidden_matrices,
        )
    clips = {
        "norm": optax.clip_by_global_norm(settings.clip_at),
        "value": optax.clip(settings.clip_at),
        "none": optax.identity(),
    }
    return optax.chain(clips[settings.clip], optimizer)


def hidden_matrices(params):
    """Of each weight, whether it is a matrix that neither takes tokens in nor gives them out."""
    # As jspec's networks name them; the last two are DSpark's.
    outer = ("embedding", "embeddings", "head", "heads", "outputs", "before", "bias")

    def inner(path, leaf) -> bool:
        names = [getattr(key, "name", getattr(key, "key", None)) for key in path]
        name = next((name for name in reversed(names) if name), None)  # past places in tuples
        return jnp.ndim(leaf) == 2 and name not in outer

    return jax.tree_util.tree_map_with_path(inner, params)


def _muon_leaves(params):
    return jax.tree.map(
        lambda hidden: MuonDimensionNumbers() if hidden else None, hidden_matrices(params)
    )
