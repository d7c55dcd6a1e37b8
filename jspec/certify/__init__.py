"""Proofs and measurements, for users, that an acceptance rule leaves the target's law alone."""

from collections.abc import Iterator, Sequence

import jax
import jaxlib

from jspec.certify.law import law, laws, rule_of
from jspec.certify.report import Finding, Report
from jspec.certify.sampled import VOCAB_SIZE, chi_square, chi_squares
from jspec.verify import RULES, Rule

__all__ = ["Finding", "Report", "certify", "chi_square", "findings", "law", "laws"]


def certify(rules: Sequence[str | Rule] = (), *, vocab_size: int = VOCAB_SIZE) -> Report:
    """Everything about rules: exact laws by enumeration, and counts of the compiled program.

    Args:
      rules: names in ``RULES``, ``Rule``s, or dotted paths of such; () for all lossless ones.
      vocab_size: of the compiled program's rounds, such as a model's own.

    Raises:
      ValueError: a rule is not there, or ``vocab_size`` is out of range.
    """
    setting = {
        "rules": ", ".join(rule_of(rule).name for rule in rules) or "all lossless ones",
        "device": jax.devices()[0].device_kind, "jax": jax.__version__,
        "jaxlib": jaxlib.__version__, "vocab_size": str(vocab_size),
    }  # fmt: skip
    return Report(tuple(findings(rules, vocab_size=vocab_size)), setting)


def findings(
    rules: Sequence[str | Rule] = (), *, vocab_size: int = VOCAB_SIZE
) -> Iterator[Finding]:
    """What ``certify`` reports, one by one as it is found."""
    chosen = [rule_of(rule) for rule in rules]
    for rule in chosen or [rule for rule in RULES.values() if rule.lossless]:
        yield from laws(rule)
        if rule.lossless:
            yield from chi_squares(rule, vocab_size)
