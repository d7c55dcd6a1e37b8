"""The compilation of the first launch of a profile, beside the prefill of its prompts."""

import contextlib
import threading
from collections.abc import Callable

import jax

from jspec.sharding import mesh as mesh_lib


class CompileAhead:
    """Compiles a program in a thread. One that fails raises when it is called."""

    def __init__(self):
        self._thread: threading.Thread | None = None

    def begin(self, lower: Callable[[], jax.stages.Lowered]) -> None:
        """Lower a program here, and compile it in a thread."""
        try:
            lowered = lower()  # Python, of which one thread runs at a time
        except Exception:
            return

        def compile() -> None:
            with contextlib.suppress(Exception):
                lowered.compile()

        self.wait()
        self._thread = threading.Thread(target=mesh_lib.bound(compile), name="jspec-compiler")
        self._thread.start()

    def wait(self) -> None:
        """Wait for the thread, so that the program is not compiled twice."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
