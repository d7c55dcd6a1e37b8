"""Compiles the programs of one device and prints their figures, a line of JSON each.

``python -m tests.aot.worker v6e 4 decode`` compiles those whose name begins with ``decode`` for
four chips. A process of its own, because a compiler's crash would take the caller with it.
"""

import json
import sys
import time

from tests.aot import figures, programs
from tests.aot.devices import DEVICES


def main(name: str, chips: str, beginning: str = "") -> None:
    """Prints ``{"program": ..., "figures": ... | "error": ..., "seconds": ...}`` a program."""
    device = DEVICES[name]
    devices = device.describe(int(chips)) if int(chips) > 1 else device.describe(1)[:1]
    for title, program in programs.programs(device.platform, len(devices)).items():
        if not title.startswith(beginning):
            continue
        begun = time.perf_counter()
        batch = programs.BATCH if title.startswith("decode") else programs.KERNEL_BATCH
        line = {"program": title}
        try:
            traced = program.trace(programs.place(devices, batch))
            compiled = traced.lower(lowering_platforms=(device.platform,)).compile()
            line["figures"] = figures.read(compiled, program.cache_shapes)
        except Exception as error:  # whatever a compiler raises is the result
            line["error"] = f"{type(error).__name__}: {error}"[:2000]
        line["seconds"] = round(time.perf_counter() - begun, 1)
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
