"""The platform that JAX runs on."""

import jax

from jspec.util.messages import first_line


def default_backend() -> str:
    """Return the name of JAX's backend; raise ValueError if the platform asked for cannot start."""
    try:
        return jax.default_backend()
    except (RuntimeError, AssertionError) as error:  # raised by a plugin, or where there is none
        asked = str(jax.config.jax_platforms)
        extra = next((name for name in ("cuda", "tpu") if name in asked), None)
        remedy = f"install it (pip install 'jspec-decoding[{extra}]'), or " if extra else ""
        reason = f" ({first_line(error)})" if str(error) else ""
        raise ValueError(
            f"JAX_PLATFORMS={asked} names a platform that JAX cannot start here{reason}; {remedy}"
            "leave JAX_PLATFORMS unset to take the devices that there are"
        ) from None
