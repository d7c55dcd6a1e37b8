"""What all tests share."""

import os
from pathlib import Path

import jax
import pytest

# Compiling takes most of the time, and LLVM's optimisations a third of that; what XLA itself makes
# of a program stays the same.
os.environ["XLA_FLAGS"] = f"--xla_backend_optimization_level=0 {os.environ.get('XLA_FLAGS', '')}"

_MAPPINGS = 40_000  # of memory; Linux gives a process 65,530
_MAPS = Path("/proc/self/maps")


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    """Forgets compiled programs before there are too many: XLA's CPU backend maps memory for each
    of them, and crashes where the system allows no more."""
    item.session.stash.setdefault(_COUNT, 0)
    item.session.stash[_COUNT] += 1
    due = item.session.stash[_COUNT] % 10 == 0 and _MAPS.exists()
    if due and _MAPS.read_bytes().count(b"\n") > _MAPPINGS:
        jax.clear_caches()


_COUNT = pytest.StashKey[int]()
