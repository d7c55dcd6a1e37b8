"""``python -m tests.aot.startup``: the programs that ``jspec serve`` compiles before it answers.

They are those of an 8B model with an EAGLE-3 head, whose weights are shapes. Each is compiled for
devices that are not there; the seconds are those of a CPU, tracing included.
"""

import functools
import json
import sys
import time
from typing import Any
from unittest import mock

import jax
import numpy as np

from jspec.engine import compilation, pages, programs
from jspec.engine.engine import Engine
from tests.aot import cells
from tests.aot.cells import Cell, Placing
from tests.aot.devices import DEVICES, lines_of
from tests.aot.models import MODELS

SHOWN = ("h200", "v6e")


def main(name: str | None = None) -> None:
    """Print a line of JSON for each program of a device, and their number and seconds."""
    if name is None:  # A process of its own has the environment of the compilers.
        for name in SHOWN:
            for line in lines_of("tests.aot.startup", name, timeout=3600):
                print(name, line, flush=True)
        return
    cell = Cell(name, "llama-8b", 8, 2048, 5, attention="kernel", layouts=True)
    device = DEVICES[name]
    placing = Placing(device.first(1), layouts=True)
    total, every = 0.0, calls(cell, placing)
    for each in every:
        program, seconds = compiled(each, device.platform, placing)
        total += seconds
        print(json.dumps({"program": program, "seconds": round(seconds, 1)}), flush=True)
    print(json.dumps({"program": f"all {len(every)}", "seconds": round(total)}), flush=True)


def calls(cell: Cell, placing: Placing) -> list[functools.partial]:
    """Return the calls that lower the programs of a server."""
    depth = MODELS[cell.model].num_layers
    plan = cells.plan_of(cell, DEVICES[cell.device].platform, depth)
    params = jax.eval_shape(functools.partial(cells.params_of, plan))
    params = placing.weights(params, plan, cell)
    pool = pages.Pool(plan, params, num_pages=2)
    caches = pages.shapes_of(plan, params, pages.PAGE_SIZE)
    allocate = functools.partial(pages.allocate, caches, (cell.num_pages(),), pages.PAGE_SIZE)
    pool.buffers = jax.eval_shape(allocate)  # A pool on a CPU has bits.
    engine = Engine(plan, params, num_slots=cell.batch, capacity=cells.MAX_MODEL_LEN, pool=pool)
    kept: list[functools.partial] = []
    with mock.patch.object(compilation, "_compile", lambda every, _: kept.extend(every)):
        programs.Programs(engine).compile_basic()
    return kept


def compiled(call: functools.partial, platform: str, placing: Placing) -> tuple[str, float]:
    """Compile a program; return its name, and the seconds of a CPU with tracing."""

    def described(x: Any) -> Any:
        is_array = isinstance(x, np.ndarray | np.generic | jax.Array)
        return placing.whole(jax.ShapeDtypeStruct(x.shape, x.dtype)) if is_array else x

    begin, program = time.process_time(), call.func.__self__
    arguments, keywords = jax.tree.map(described, (call.args, call.keywords))
    traced = program.trace(*arguments, **keywords)
    traced.lower(lowering_platforms=(platform,)).compile()
    return program.__name__, time.process_time() - begin


if __name__ == "__main__":
    main(*sys.argv[1:])
