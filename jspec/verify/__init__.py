"""Acceptance rules: they select the drafted nodes to keep, and the next token's distribution.

``RULES`` lists them, ``Rule`` describes one and ``verify`` runs one. A rule's walk is a pure
function of (processed logits, draft, tree, randomness, proposal), so that ``jspec.tools.certify``
can enumerate the shipped code. Sampled rounds run ``match`` as ``follow``, which draws less; tests
enumerate both. ``Plan`` takes the user's own ``Rule`` in place of a name.
"""

from jspec.verify.rule import Rule
from jspec.verify.rules import MAKERS, RULES, load_rule, synthetic, typical
from jspec.verify.verdicts import verify

__all__ = ["MAKERS", "RULES", "Rule", "load_rule", "synthetic", "typical", "verify"]
