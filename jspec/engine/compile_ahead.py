"""The compilation of the first launch of a profile, beside the prefill of its prompts."""

import contextlib
import threading
from collections.abc import Callable, Hashable

import jax


class CompileAhead:
    """Compiles programs in a thread, each once. A program that fails raises when it is called."""

    def __init__(self):
        self._begun: set[Hashable] = set()
        self._thread: threading.Thread | None = None

    def begin(self, program: Hashable, lower: Callable[[], jax.stages.Lowered]) -> None:
        """Lower ``program`` here, unless that was done before, and compile it in a thread."""
        if program in self._begun:
            return
        self._begun.add(program)
        try:
            lowered = lower()  # Python, of which one thread runs at a time
        except Exception:
            return

        def compile() -> None:
            with contextlib.suppress(Exception):
                lowered.compile()

        self.wait()
        self._thread = threading.Thread(target=compile, name="jspec-compiler")
        self._thread.start()

    def wait(self) -> None:
        """Wait for the thread, so that the program is not compiled twice."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
