"""Chips that need not be there: memory, bandwidth and peak of each.

Sources: Google's pages of TPU v4, v5e, v5p, v6e and TPU7x (docs.cloud.google.com/tpu/docs), and
NVIDIA's data sheets of A100, L4, L40S, H100 (SXM), H200 and B200. Peaks are those of dense products
in bfloat16. The memory is what programs can have, a little less than the name of a GPU says.
"""

import dataclasses
import re

from jspec.util.messages import shown
from jspec.util.values import is_whole

_GPU_SHARE = 0.75  # JAX's default; XLA_PYTHON_CLIENT_MEM_FRACTION changes it


@dataclasses.dataclass(frozen=True)
class Chip:
    """A kind of chip.

    Attributes:
      memory: GiB.
      bandwidth: GB/s of its memory.
      peak: TFLOP/s of dense products in bfloat16.
      share: share of the memory that JAX takes.
      devices: devices that JAX has for a chip.
    """

    memory: float
    bandwidth: float
    peak: float
    share: float = 1.0
    devices: int = 1


CHIPS = {
    "v4": Chip(32, 1228, 275),
    "v5e": Chip(16, 819, 197),
    "v5p": Chip(95, 2765, 459),
    "v6e": Chip(32, 1638, 918),
    "7x": Chip(192, 7380, 2307, devices=2),
    "A100": Chip(79, 2039, 312, _GPU_SHARE),
    "L4": Chip(22, 300, 121, _GPU_SHARE),
    "L40S": Chip(44, 864, 362, _GPU_SHARE),
    "H100": Chip(79, 3350, 989, _GPU_SHARE),
    "H200": Chip(139, 4800, 989, _GPU_SHARE),
    "B200": Chip(178, 8000, 2250, _GPU_SHARE),
}


def parse(device: str) -> tuple[str, int]:
    """Return the kind and the number of chips of a name such as "v5e-8"; one without a number.

    >>> parse("v5e-8"), parse("h200")
    (('v5e', 8), ('H200', 1))

    Raises:
      ValueError: there is no such kind, or no such number.
    """
    kinds = {name.lower(): name for name in CHIPS}
    match = re.fullmatch(r"(?:tpu-?)?([a-z0-9]+?)(?:-(\d{1,6}))?", str(device).lower())
    if match is None or match[1] not in kinds or not is_whole(int(match[2] or 1), 1):
        raise ValueError(
            f"device={shown(device)} must be one of {', '.join(CHIPS)}, and the number of chips "
            "behind it, such as 'v5e-8'."
        )
    return kinds[match[1]], int(match[2] or 1)
