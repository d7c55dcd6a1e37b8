"""Compile the programs of one device and print their figures, a line of JSON each.

``python -m tests.aot.worker v6e 4 decode`` compiles those whose name begins with ``decode`` for
four chips. It is a process of its own, because a compiler may crash.
"""

import json
import sys
import time

from tests.aot import figures, programs
from tests.aot.devices import DEVICES


def main(name: str, chips: str, beginning: str = "") -> None:
    """Print ``{"program": ..., "figures": ... | "error": ..., "seconds": ...}`` per program."""
    device = DEVICES[name]
    devices = device.describe(int(chips)) if int(chips) > 1 else device.describe(1)[:1]
    for title, program in programs.programs(device.platform, len(devices)).items():
        if not title.startswith(beginning):
            continue
        begun = time.perf_counter()
        batch = programs.BATCH if title.startswith(("decode", "prefill")) else programs.KERNEL_BATCH
        line = {"program": title}
        try:
            traced = program.trace(programs.placing(devices, batch))
            compiled = traced.lower(lowering_platforms=(device.platform,)).compile()
            line["figures"] = figures.read(compiled, program.cache_shapes)
        except Exception as error:  # any error of a compiler is a result
            line["error"] = f"{type(error).__name__}: {error}"[:2000]
        line["seconds"] = round(time.perf_counter() - begun, 1)
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
