"""The drafting methods: one file each, and the table of all in ``methods``.

Names of ``methods`` are imported at their first use (PEP 562), so that a method loads itself alone.
"""

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    methods = importlib.import_module("jspec.drafters.methods")
    if name not in vars(methods):
        raise AttributeError(f"module 'jspec.drafters' has no attribute {name!r}")
    return vars(methods)[name]
