"""Fixtures and JAX settings of all tests."""

import ctypes
import gc
import os
import shutil
import sys
import tempfile
from pathlib import Path

import hypothesis
import jax
import pytest

from tests import shipped

# Compilation takes most of the time: LLVM's optimisations a third of it, the MLIR fusion emitters
# half of the rest. These flags turn both off, and parallel codegen too: pytest has a worker per
# core. Tests that run longer than they compile, such as 50,000 rows, ask for level 1 themselves.
_FLAGS = ["--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1"]
if shipped.EMITTERS_CAN_BE_CHOSEN:
    _FLAGS.append("--xla_cpu_use_fusion_emitters=false")
os.environ["XLA_FLAGS"] = " ".join([*_FLAGS, os.environ.get("XLA_FLAGS", "")])

# All processes of a run share compiled programs, small ones too. Set JAX_COMPILATION_CACHE_DIR to
# keep them for the next run. Without Python tracebacks in the programs, tracing is faster.
_SETTINGS = {
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
    "jax_traceback_in_locations_limit": 0,
}

# `make test-more` runs these, and `make test` the others. A person waits for those.
_MORE = (
    "aot",
    "api/test_backends.py",
    "api/test_llm_heads.py",
    "api/test_llm_hybrid.py",
    "api/test_llm_mtp.py",
    "benchmarks",
    "drafters",
    "checkpoints/test_mxfp4.py",
    "checkpoints/test_parts.py",
    "checkpoints/test_gguf_blocks.py",
    "checkpoints/test_quantization.py",
    "checkpoints/test_quantised_formats.py",
    "checkpoints/test_quantised_heads.py",
    "cli/test_quantization.py",
    "core/test_quantized.py",
    "engine/test_budget.py",
    "engine/test_captured.py",
    "engine/test_entries.py",
    "engine/test_lengths.py",
    "engine/test_narrow_caches.py",
    "engine/test_packing.py",
    "engine/test_programs.py",
    "engine/test_replicas.py",
    "engine/test_updates.py",
    "engine/test_windows.py",
    "families",
    "grammar/test_bounds.py",
    "grammar/test_followed.py",
    "grammar/test_formats.py",
    "grammar/test_limits.py",
    "hostile",
    "kernels",
    "models/test_delta_rule.py",
    "models/test_dflash.py",
    "models/test_heads.py",
    "models/test_heads_speculators.py",
    "models/test_mtp.py",
    "models/test_weights.py",
    "test_conformance.py",
    "test_conformance_on_a_mesh.py",
    "test_deeper_target.py",
    "test_documentation.py",
    "test_examples.py",
    "test_notebooks.py",
    "test_packaging.py",
    "test_replicas.py",
    "test_reproducibility.py",
    "test_several_devices.py",
    "test_several_processes.py",
    "tools",
    "training",
)

# On busy cores an example may take long.
hypothesis.settings.register_profile("jspec", deadline=None)
hypothesis.settings.load_profile("jspec")

_MAPPINGS = 40_000  # memory mappings; Linux allows a process 65,530
_MAPS = Path("/proc/self/maps")
_RESIDENT = 2_000 * 2**20  # bytes of a process above which its programs are dropped
_STATM = Path("/proc/self/statm")  # its second number is that of the resident pages


def pytest_configure(config):
    """Set the folder of compiled programs, for this process and its children."""
    folder = jax.config.jax_compilation_cache_dir  # set by the caller or the parent process
    if folder is None:
        folder = tempfile.mkdtemp(prefix="jspec-tests-")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    for name, value in {**_SETTINGS, "jax_compilation_cache_dir": folder}.items():
        os.environ[name.upper()] = str(value)
        jax.config.update(name, value)


@pytest.fixture(autouse=True, scope="session")
def programs_stay():
    """Let no engine release programs: tests count those that they compile."""
    from jspec.engine import program_memory

    program_memory.MOST_BYTES = 1 << 40


@pytest.fixture(scope="session")
def root(tmp_path_factory):
    """Return the folder of the checkpoints that tests share (``tests/llm_fixtures.py``)."""
    return tmp_path_factory.getbasetemp() / "llm"


def pytest_ignore_collect(collection_path, config):
    """Import no file whose tests ``make test`` or ``make test-more`` leave out."""
    expression, is_file = config.option.markexpr, collection_path.is_file()
    if "not more" in expression and _is_more(collection_path):
        return True
    if expression.startswith("more") and is_file and not _is_more(collection_path):
        return True
    return None


def pytest_collection_modifyitems(items):
    """Mark what ``make test-more`` runs."""
    for item in items:
        if _is_more(item.path):
            item.add_marker("more")


def _is_more(path: Path) -> bool:
    """Return whether ``make test-more`` runs the tests below a path."""
    return any(path.is_relative_to(Path(__file__).parent / name) for name in _MORE)


def pytest_collection_finish():
    """Exclude the collected tests from garbage collection, which tracing triggers often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    """Drop compiled programs before the process runs out of memory mappings, or fills the memory.

    XLA's CPU backend crashes without mappings. Programs come back from the folder of compiled ones.
    """
    item.session.stash.setdefault(_COUNT, 0)
    item.session.stash[_COUNT] += 1
    due = item.session.stash[_COUNT] % 10 == 0 and _MAPS.exists()
    if _is_large() or (due and _MAPS.read_bytes().count(b"\n") > _MAPPINGS):
        jax.clear_caches()
        gc.collect()
        if sys.platform == "linux" and hasattr(ctypes.CDLL(None), "malloc_trim"):
            ctypes.CDLL(None).malloc_trim(0)


def _is_large() -> bool:
    """Return whether the process holds more than ``_RESIDENT`` bytes."""
    if not _STATM.exists():
        return False
    return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") > _RESIDENT


_COUNT = pytest.StashKey[int]()
