"""Shared fixtures of the drafter tests."""

import jax
import pytest


@pytest.fixture
def quick_programs():
    """Compile with few optimisations: these tests check values, not speed."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
