"""Learning-rate schedules and optimisers by name."""

import jax
import optax
from optax.contrib import MuonDimensionNumbers, muon

SCHEDULES = ("cosine", "wsd")
OPTIMIZERS = ("adamw", "muon")


def make_schedule(name: str, peak: float, *, steps: int, warmup: int, decay: int) -> optax.Schedule:
    """Learning rate by step: a linear warm-up, then ``cosine`` or ``wsd``.

    ``cosine`` falls to a tenth of the peak at ``steps``. ``wsd`` (warm-up, stable, decay: arXiv
    2405.18392) holds the peak and falls linearly to zero over the last ``decay`` steps: until the
    fall starts it does not depend on ``steps``, so a run may be resumed with another length.
    """
    if name == "cosine":
        return optax.warmup_cosine_decay_schedule(0.0, peak, warmup, steps, peak / 10)
    pieces = [
        optax.linear_schedule(0.0, peak, warmup),
        optax.constant_schedule(peak),
        optax.linear_schedule(peak, 0.0, decay),
    ]
    return optax.join_schedules(pieces, [warmup, max(warmup, steps - decay)])


def make_optimizer(
    name: str, schedule: optax.Schedule, weight_decay: float
) -> optax.GradientTransformation:
    """``adamw``, or ``muon`` for the matrices inside the blocks with AdamW for all the rest.

    Muon (arXiv 2502.16982) scales its updates to AdamW's usual size, so both take one learning
    rate. Only matrices decay; norms and the embedding's rows do not.
    """
    if name == "muon":
        optimizer = muon(
            schedule, weight_decay=weight_decay, consistent_rms=0.2, adam_b2=0.98,
            muon_weight_dimension_numbers=_muon_leaves,
        )  # fmt: skip
    else:
        optimizer = optax.adamw(schedule, b2=0.98, weight_decay=weight_decay, mask=_hidden_matrices)
    return optax.chain(optax.clip_by_global_norm(1.0), optimizer)


def _hidden_matrices(params):
    """True for the matrices inside the blocks."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf.ndim == 2 and "layers" in jax.tree_util.keystr(path), params
    )


def _muon_leaves(params):
    return jax.tree.map(
        lambda hidden: MuonDimensionNumbers() if hidden else None, _hidden_matrices(params)
    )
