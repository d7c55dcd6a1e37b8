"""Errors of a step: whose they are, and how a sequence that failed alone reports them."""

import re

import jax

INTERRUPTIONS = KeyboardInterrupt, SystemExit  # they end the process, and belong to no sequence
_STATUS = re.compile("(ABORTED|DATA_LOSS|INTERNAL|RESOURCE_EXHAUSTED|UNAVAILABLE|UNKNOWN): ")


def is_of_device(error: BaseException) -> bool:
    """Return whether a program failed while it ran; later uses of its results say so too."""
    is_status = isinstance(error, ValueError) and _STATUS.match(str(error))
    return isinstance(error, jax.errors.JaxRuntimeError) or bool(is_status)


def of_sequence(error: BaseException) -> Exception:
    """Return the error of a sequence that failed alone.

    A check that refused it stays a ValueError; other errors become RuntimeError.
    """
    if isinstance(error, ValueError) and not is_of_device(error):
        return error
    first, remedy = str(error).strip().partition("\n")[0], "what it asks for may be at fault"
    if "RESOURCE_EXHAUSTED" in str(error):
        remedy = "there is too little memory; run fewer sequences together, or give the cache less"
    elif is_of_device(error):
        remedy = "its logits processors or the device may be at fault"
    else:
        first = f"{type(error).__name__}: {first}"
    fault = RuntimeError(f"a launch failed while this sequence ran alone: {first}; {remedy}.")
    fault.__cause__ = error
    return fault


def of_memory(most_tokens: int) -> MemoryError:
    """Return the error of a sequence that all pages of the KV cache do not suffice for."""
    return MemoryError(
        f"the memory of the KV cache suffices for {most_tokens} tokens, and the text became "
        "longer; ask for less, or give the cache more memory."
    )
