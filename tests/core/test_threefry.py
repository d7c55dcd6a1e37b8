import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry2x32_p

from jspec.core.sampling import threefry


def test_threefry_equals_the_generator_of_jax_bit_for_bit():
    words = jax.random.bits(jax.random.key(0), (4, 1000), jnp.uint32)
    ours = threefry((words[0], words[1]), (words[2], words[3]))
    theirs = threefry2x32_p.bind(*words)
    np.testing.assert_array_equal(ours, theirs)
