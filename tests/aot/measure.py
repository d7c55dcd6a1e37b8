"""Compile the launch of one cell with few layers, and print its figures at the full depth.

``python -m tests.aot.measure '{"device": "v6e", ...}'`` takes the fields of a ``cells.Cell``. The
figures are linear in the number of layers, so two depths give those of all layers. Compile seconds
are those of the deeper program. It is a process of its own, because a compiler may crash.
"""

import json
import os
import sys
import time

from jspec.engine.pages import PAGE_SIZE
from jspec.models.layouts import SMALL_TILES
from tests.aot import cells, figures, traffic
from tests.aot.cells import Cell
from tests.aot.devices import DEVICES
from tests.aot.models import MODELS

DEPTHS = (2, 4)  # layers that are compiled
# Below few layers of a target, a TPU keeps the small parts of a split drafter in its fast memory.
DEEPER = {"v5e": (12, 16), "v6e": (4, 8), "tpu7x": (12, 16)}


def main(text: str) -> None:
    """Print ``{"program": ..., "figures": ... | "error": ...}``, and a line for each depth."""
    cell = Cell(**json.loads(text))
    line = {"program": cell.name}
    if cell.device == "tpu7x" and cell.tp > 1:  # an option of docs/tpu_and_gpu.md
        os.environ["LIBTPU_INIT_ARGS"] = SMALL_TILES
    try:
        line["figures"] = figures_of(cell)
    except Exception as error:  # any error of a compiler is a result
        line["error"] = f"{type(error).__name__}: {error}"[:2000]
    print(json.dumps(line), flush=True)


def figures_of(cell: Cell) -> dict[str, float]:
    """Return the figures of a cell at the full depth of its model."""
    model, kinds = MODELS[cell.model], {}
    depths = DEEPER.get(cell.device, DEPTHS) if cell.draft_tp > 1 else DEPTHS
    for others in (False, True)[: 1 + bool(model.num_others)]:
        kinds[others] = [compiled(cell, depth, others=others) for depth in depths]
    layers = {False: model.num_layers - model.num_others, True: model.num_others}
    full = extrapolated(kinds, layers, depths)
    return {
        "ratio": round(full["bytes"] / full["minimum"], 3),
        "gigabytes": round(full["bytes"] / 1e9, 2),
        "collectives": round(full["collectives"]),
        "weight_copies": round(full["weight_copies"] / full["weights"], 3),
        "cache_copies": round(full["cache_copies"]),
        "temporaries": round(full["temporaries"] / full["weights"], 3),
        "memory": round((full["weights"] + full["pools"] + full["temporaries"]) / 1e9, 1),
        "seconds": round(kinds[False][-1]["seconds"]),  # CPU time of the deeper program
    }


def extrapolated(
    kinds: dict[bool, list[dict[str, float]]],
    layers: dict[bool, int],
    depths: tuple[int, int] = DEPTHS,
) -> dict[str, float]:
    """Return figures for numbers of ``layers`` by kind; True for the second one.

    ``kinds`` has the figures of programs whose layers are of one kind, at two ``depths``.
    """
    (low, high), (least, _) = depths, kinds[False]
    figures = {}
    for name in least:
        slopes = {
            kind: (deep[name] - shallow[name]) / (high - low)
            for kind, (shallow, deep) in kinds.items()
        }
        outside = least[name] - low * slopes[False]
        figures[name] = outside + sum(slope * layers[kind] for kind, slope in slopes.items())
    return figures


def compiled(cell: Cell, depth: int, *, others: bool) -> dict[str, float]:
    """Compile a cell with ``depth`` layers of the model's first kind or second."""
    device = DEVICES[cell.device]
    placing = cells.Placing(device.first(cell.tp), layouts=cell.layouts)
    begun = time.process_time()
    traced = cells.trace(cell, device.platform, depth, placing, others=others)
    program = traced.launch.lower(lowering_platforms=(device.platform,)).compile()
    seconds, model = time.process_time() - begun, MODELS[cell.model]
    sizes = model.sizes
    caches = traffic.Caches(
        (max(1, sizes["num_kv_heads"] // cell.tp), PAGE_SIZE, sizes["head_dim"]),
        rows=cell.batch,
        context=cell.context,
        window=model.window if others else None,
    )
    read = traffic.read(
        program.as_text(), caches, traced.weight_shapes, chosen=cells.chosen_share(cell)
    )
    whole = figures.read(program, traced.cache_shapes)
    result = {
        "bytes": read.size,
        "minimum": traced.minimum,
        "weights": traced.weights,
        "pools": traced.pools,
        "collectives": sum(read.collectives.values()),
        "weight_copies": read.weight_copies,
        "cache_copies": whole["cache_copies_in_loop"] + whole["cache_copies_once"],
        "temporaries": whole["temp_bytes"],
        "seconds": round(seconds, 1),
    }
    print(
        f"  {depth} layers{' of the second kind' * others}: {result}", file=sys.stderr, flush=True
    )
    return result


if __name__ == "__main__":
    main(*sys.argv[1:])
