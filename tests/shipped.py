"""Compilation with the options of users, not with the faster ones of ``conftest``."""

import jaxlib

# XLA ends the process at an unknown flag, and later versions may drop this one.
EMITTERS_CAN_BE_CHOSEN = jaxlib.version.__version_info__ < (0, 11)


def compiled(lowered):
    """Compile a lowered program with the fusion and copy passes that users get."""
    options = {"xla_cpu_use_fusion_emitters": True} if EMITTERS_CAN_BE_CHOSEN else {}
    return lowered.compile(options)
