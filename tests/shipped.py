"""Programs as users compile them, whatever ``conftest`` tells XLA to leave out."""

import jaxlib

# An unknown flag ends the process, so what later versions may have dropped is set in known ones.
EMITTERS_CAN_BE_CHOSEN = jaxlib.version.__version_info__ < (0, 11)


def compiled(lowered):
    """A lowered program, compiled by the passes that choose fusions and copies for users."""
    options = {"xla_cpu_use_fusion_emitters": True} if EMITTERS_CAN_BE_CHOSEN else {}
    return lowered.compile(options)
