"""Learning-rate schedules and optimisers by name."""

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers, muon

from training.trainer.settings import TrainerSettings

# Names of weights at the ends of jspec's networks; the last two are DSpark's.
_OUTER = ("embedding", "embeddings", "head", "heads", "outputs", "before", "bias")


def make_schedule(settings: TrainerSettings) -> optax.Schedule:
    """Return the learning rate by step: a linear warm-up, then ``settings.schedule``.

    ``cosine`` and ``linear`` fall to ``learning_rate_floor`` of the peak at ``steps``. ``wsd``
    (warm-up, stable, decay: arXiv 2405.18392) holds the peak and falls linearly to zero over the
    last ``decay`` steps. Before that it does not depend on ``steps``, so a run may be resumed with
    another length; nor does ``constant`` ever.
    """
    peak, warmup, steps = settings.learning_rate, settings.warmup, settings.steps
    floor, falling = settings.learning_rate_floor, max(steps - warmup, 1)
    parts = {
        "cosine": [optax.cosine_decay_schedule(peak, falling, floor)],
        "linear": [optax.linear_schedule(peak, floor * peak, falling)],
        "wsd": [optax.constant_schedule(peak), optax.linear_schedule(peak, 0.0, settings.decay)],
        "constant": [optax.constant_schedule(peak)],
    }[settings.schedule]
    borders = [warmup, max(warmup, steps - settings.decay)][: len(parts)]
    return optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), *parts], borders)


def make_optimizer(settings: TrainerSettings) -> optax.GradientTransformation:
    """Return ``adamw``, or ``muon`` for the matrices inside the blocks with AdamW for the rest.

    Muon (arXiv 2502.16982) scales its updates to AdamW's usual size, so both take one learning
    rate. Only matrices decay; vectors, embeddings and output matrices do not.
    """
    schedule, decay = make_schedule(settings), settings.weight_decay
    if settings.optimizer == "muon":
        optimizer = muon(
            schedule,
            weight_decay=decay,
            consistent_rms=0.2,
            adam_learning_rate=lambda step: settings.adamw_share * schedule(step),
            adam_b1=settings.beta1,
            adam_b2=settings.beta2,
            muon_weight_dimension_numbers=lambda params: jax.tree.map(
                lambda hidden: MuonDimensionNumbers() if hidden else None, hidden_matrices(params)
            ),
        )
    else:
        optimizer = optax.adamw(
            schedule,
            b1=settings.beta1,
            b2=settings.beta2,
            weight_decay=decay,
            mask=hidden_matrices,
        )
    clips = {
        "norm": optax.clip_by_global_norm(settings.clip_at),
        "value": optax.clip(settings.clip_at),
        "none": optax.identity(),
    }
    return optax.chain(clips[settings.clip], optimizer)


def hidden_matrices(params):
    """Return masks of the matrices inside the network; embeddings and heads are excluded."""

    def inner(path, leaf) -> bool:
        keys = (jax.tree_util.keystr((key,), simple=True) for key in reversed(path))
        name = next((key for key in keys if not key.isdigit()), "")  # skip indices of tuples
        return jnp.ndim(leaf) == 2 and name not in _OUTER

    return jax.tree_util.tree_map_with_path(inner, params)
