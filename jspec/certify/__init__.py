"""Proofs and measurements, for users, that speculation leaves the target's law alone."""

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jaxlib

from jspec import loading
from jspec.certify.configuration import MAX_TOKENS, TEMPERATURE, Asked, Say, certified, of_plan
from jspec.certify.drafters import NUM_DRAFTS, drafts
from jspec.certify.law import law, laws, rule_of
from jspec.certify.report import Finding, Report
from jspec.certify.sampled import VOCAB_SIZE, chi_square, chi_squares
from jspec.certify.texts import texts
from jspec.loading import LoadedModel
from jspec.verify import RULES, Rule

__all__ = [
    "Finding", "Report", "certify", "chi_square", "drafts", "findings", "law", "laws", "of_plan",
    "texts",
]  # fmt: skip


def certify(
    rules: str | Rule | Sequence[str | Rule] = (),
    *,
    vocab_size: int | None = None,
    model: str | os.PathLike | LoadedModel | None = None,
    speculative_config: Mapping[str, Any] | None = None,
    prompts: Any = None,
    max_tokens: int = MAX_TOKENS,
    dtype: str | None = None,
    temperature: float = TEMPERATURE,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    num_drafts: int = NUM_DRAFTS,
    progress: Say = lambda _: None,
) -> Report:
    """Certifies acceptance rules, or a whole configuration of an ``LLM``. See docs/losslessness.md.

    Rules: exact laws by enumeration, and counts of the compiled program. A configuration: its rule
    likewise, for its own kind of drafts and vocabulary; its drafter's draws beside the laws that it
    recorded; and its texts beside those of plain decoding, greedy and drawn.

    Args:
      rules: a name in ``RULES``, a ``Rule``, the dotted path of one, or several of these; () for
        all lossless ones. Not with ``model``, whose rule ``speculative_config`` names.
      vocab_size: of the compiled rules' rounds; None for 16. Not with ``model``, which has its own.
      model: of the target, as for ``LLM``; None to certify rules.
      speculative_config: as for ``LLM``.
      prompts: as for ``LLM.generate``; None for a few of jspec's.
      max_tokens: to continue each prompt by.
      dtype: as for ``LLM``.
      temperature: of what is drawn, more than 0; this and what follows are of a configuration.
      top_k: as in ``SamplingParams``.
      top_p: as in ``SamplingParams``.
      min_p: as in ``SamplingParams``.
      seed: of the noise.
      num_drafts: rounds whose draws are compared with the recorded laws.
      progress: is told what is being done.

    Returns:
      The report: ``report.passed``, ``report.findings``, ``report.save(path)``.

    Raises:
      ValueError: a rule is not there, an argument is out of range or goes with the other kind of
        certificate, or ``LLM`` would refuse the configuration.
    """
    device = {"device": jax.devices()[0].device_kind, "jax": jax.__version__,
              "jaxlib": jaxlib.__version__}  # fmt: skip
    if model is None:
        if speculative_config is not None:
            raise ValueError("speculative_config is given without a model; give model=... as well.")
        chosen = (rules,) if isinstance(rules, str | Rule) else tuple(rules)
        size = VOCAB_SIZE if vocab_size is None else vocab_size
        names = ", ".join(rule_of(rule).name for rule in chosen) or "all lossless ones"
        progress("enumerating drafts and coins, counting tokens")
        found = tuple(findings(chosen, vocab_size=size))
        return Report(found, {"rules": names, **device, "vocab_size": str(size)})
    for name, given in (("rules", rules or None), ("vocab_size", vocab_size)):
        if given is not None:
            raise ValueError(
                f"{name}={given!r} is of certificates of rules; of a model it is what "
                "speculative_config and the model say, so leave it out."
            )
    sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p,
                "seed": seed}  # fmt: skip
    asked = Asked(model, speculative_config, prompts, max_tokens, dtype, num_drafts, sampling)
    loading.keep_compiled_programs()
    found, remarks, setting = certified(asked, progress)
    return Report(tuple(found), {**setting, **device}, tuple(remarks))


def findings(
    rules: Sequence[str | Rule] = (), *, vocab_size: int = VOCAB_SIZE
) -> Iterator[Finding]:
    """What ``certify`` reports of rules, one by one as it is found."""
    chosen = [rule_of(rule) for rule in rules]
    for rule in chosen or [rule for rule in RULES.values() if rule.lossless]:
        yield from laws(rule)
        if rule.lossless:
            yield from chi_squares(rule, vocab_size)
