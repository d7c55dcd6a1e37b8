"""The memory of compiled programs: a bound in bytes, and what compiling leaves behind.

On a CPU nearly all of it is XLA's form of the program, some 2 KB an instruction: a launch of 50,000
instructions holds 110 MB, and its machine code 1 MB.
"""

import collections
import ctypes
import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

import jax

from jspec.engine import slots
from jspec.engine.loop import cancel, launch, prefill
from jspec.engine.masked_round import draft_alone, verify_alone

# Bytes that programs may hold. With 0.9 GB of weights, libraries and caches, a server of SmolLM2
# then stays below 3 GB.
MOST_BYTES = 3 << 29
_BYTES_IN_MEMORY = 14  # bytes of a program for each of its serialized form: 12 to 16 were measured
_COMPILED = "/jax/core/compile/backend_compile_duration"  # JAX's event; it has the time in seconds
_LONG = 0.5  # seconds of a compilation that leaves much memory behind
_STEPS = launch, draft_alone, verify_alone, prefill, cancel, slots.seat, slots.allocate
_STEP_OF = {f"jit_{step.__name__}": step for step in _STEPS}

RELEASES = collections.Counter()  # number of releases of each step's programs, in this process
_sizes: dict[tuple[int, str], int] = {}  # bytes of programs, by object and name
_lock = threading.Lock()  # guards ``_sizes``


def bound(release: Callable[[str], None]) -> None:
    """Release the programs of the largest steps until the others hold at most ``MOST_BYTES``.

    Engines call it before they compile: when they are made, and when their profile has changed.
    ``release`` is called with the names of these steps; see ``release`` below.
    """
    _watch_compilations()
    sizes = held()
    while sizes.total() > MOST_BYTES:
        ((name, _),) = sizes.most_common(1)
        del sizes[name]
        release(name)


def release(name: str) -> None:
    """Release all programs of a step, by the name of their modules; JAX releases no single one.

    Those that are still needed compile again.
    """
    _STEP_OF[name].clear_cache()
    RELEASES[name] += 1


def held() -> collections.Counter[str]:
    """Return about how many bytes the programs of each step hold, by the names of their modules."""
    alive = {}
    for program in jax.devices()[0].client.live_executables():
        module = program.hlo_modules()[0]
        if module.name in _STEP_OF:
            alive[id(program), module.name] = module
    sizes = collections.Counter()
    with _lock:
        for key in _sizes.keys() - alive.keys():
            del _sizes[key]
        for key, module in alive.items():
            if key not in _sizes:
                _sizes[key] = _BYTES_IN_MEMORY * len(module.as_serialized_hlo_module_proto())
            sizes[key[1]] += _sizes[key]
    return sizes


@functools.cache
def _watch_compilations() -> None:
    """Call ``_on_event`` after every compilation in this process, of whichever thread."""
    jax.monitoring.register_event_duration_secs_listener(_on_event)


def _on_event(event: str, seconds: float, **_: Any) -> None:
    """Give the memory of a long compilation back to the system, and measure the new program.

    glibc keeps what XLA has freed: some 0.3 GB after each launch.
    """
    if event == _COMPILED and seconds > _LONG:
        held()
        if sys.platform == "linux":
            trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
            if trim is not None:
                trim(0)
