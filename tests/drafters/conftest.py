"""What tests of drafters share."""

import jax
import pytest


@pytest.fixture
def quick_programs():
    """Compiled soon: what is tested is what programs say, not how fast they say it."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
