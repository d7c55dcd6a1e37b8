"""The prompts of all comparisons; they load neither torch nor JAX."""

import numpy as np

from tests.families import rows

_rng = np.random.default_rng(0)
PROMPTS = [_rng.integers(0, rows.SIZES["vocab_size"], length).tolist() for length in (13, 3)]
