"""SIGTERM and Ctrl-C while a run is under way."""

import signal
import threading


class Signals:
    """While open, the first SIGTERM or SIGINT only sets ``asked``; the next acts as ever.

    Outside the main thread, where Python takes no signals, it does nothing.
    """

    def __init__(self):
        self.asked = False
        self._before: dict = {}

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():
            numbers = (signal.SIGTERM, signal.SIGINT)
            self._before = {number: signal.signal(number, self._ask) for number in numbers}
        return self

    def _ask(self, number, frame):
        self.asked = True
        self._restore()

    def _restore(self):
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def __exit__(self, *error):
        self._restore()
