"""What all tests share."""

import gc
import os
import shutil
import tempfile
from pathlib import Path

import jax
import pytest

from tests import shipped

# Compiling takes most of the time: LLVM's optimisations a third of it, and emitters that build
# every fusion in MLIR half of what remains. Without them a fusion is emitted as LLVM at once; and a
# module in one piece, as there is a worker for each core. What runs for longer than it compiles,
# such as a batch of 50,000 rows, asks for level 1 itself.
_FLAGS = ["--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1"]
if shipped.EMITTERS_CAN_BE_CHOSEN:
    _FLAGS.append("--xla_cpu_use_fusion_emitters=false")
os.environ["XLA_FLAGS"] = " ".join([*_FLAGS, os.environ.get("XLA_FLAGS", "")])

# Whatever is compiled is kept for all processes of a run, and small programs too: most are wanted
# again. To keep it for the next run as well, set JAX_COMPILATION_CACHE_DIR. The calls that each
# operation stands below, up to 100, are read by nobody, and written in a tenth of the time.
_SETTINGS = {
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
    "jax_traceback_in_locations_limit": 0,
}

_MAPPINGS = 40_000  # of memory; Linux gives a process 65,530
_MAPS = Path("/proc/self/maps")


def pytest_configure(config):
    """Names the place of compiled programs, to this process and, in the environment, to others."""
    folder = jax.config.jax_compilation_cache_dir  # the caller's, or of who started this process
    if folder is None:
        folder = tempfile.mkdtemp(prefix="jspec-tests-")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    for name, value in {**_SETTINGS, "jax_compilation_cache_dir": folder}.items():
        os.environ[name.upper()] = str(value)
        jax.config.update(name, value)


def pytest_collection_finish():
    """Spares Python from looking for garbage among what stays, at every few steps of tracing."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)


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
