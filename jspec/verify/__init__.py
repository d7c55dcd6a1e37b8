"""Acceptance rules: they select the drafted nodes to keep, and the next token's distribution.

``RULES`` lists them, ``Rule`` describes one and ``verify`` runs one. A rule's walk is a pure
function of (processed logits, draft, tree, randomness, proposal), so that ``jspec.tools.certify``
can enumerate the shipped code. Sampled rounds run ``match`` as ``follow``, which draws less; tests
enumerate both. ``Plan`` takes the user's own ``Rule`` in place of a name.
"""

import importlib
from typing import TYPE_CHECKING, Any

from jspec.verify.rule import Rule
from jspec.verify.verdicts import verify

if TYPE_CHECKING:
    from jspec.verify.rules import (
        RULES,
        check_backend,
        check_fit,
        load_rule,
        synthetic,
        typical,
    )

__all__ = [
    "RULES",
    "Rule",
    "check_backend",
    "check_fit",
    "load_rule",
    "synthetic",
    "typical",
    "verify",
]


def __getattr__(name: str) -> Any:
    """Import the table of all rules at its first use (PEP 562)."""
    if name not in __all__:
        raise AttributeError(f"module 'jspec.verify' has no attribute {name!r}")
    value = vars(importlib.import_module("jspec.verify.rules"))[name]
    return globals().setdefault(name, value)
