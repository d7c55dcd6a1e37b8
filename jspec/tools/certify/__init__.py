"""Proofs and measurements, for users, that speculation leaves the target's law alone."""

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jaxlib

from jspec.engine import loading
from jspec.engine.loading import LoadedModel
from jspec.tools.certify.configuration import Asked, Say, certified, of_plan
from jspec.tools.certify.distribution import distribution, distributions, rule_of
from jspec.tools.certify.drafters import drafts
from jspec.tools.certify.report import Finding, Report
from jspec.tools.certify.sampled import VOCAB_SIZE, chi_square, chi_squares
from jspec.tools.certify.texts import texts
from jspec.verify import RULES, Rule

__all__ = [
    "Finding",
    "Report",
    "certify",
    "chi_square",
    "distribution",
    "distributions",
    "drafts",
    "findings",
    "of_plan",
    "texts",
]


def certify(
    rules: str | Rule | Sequence[str | Rule] = (),
    *,
    vocab_size: int | None = None,
    tree: Sequence[int] | None = None,
    model: str | os.PathLike | LoadedModel | None = None,
    speculative_config: Mapping[str, Any] | None = None,
    prompts: Any = None,
    max_tokens: int | None = None,
    dtype: str | None = None,
    num_drafts: int | None = None,
    deterministic: bool = False,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: int = 0,
    progress: Say = lambda _: None,
) -> Report:
    """Certifies acceptance rules, or a whole configuration of an ``LLM``. See docs/losslessness.md.

    Rules: exact laws by enumeration, and counts of the compiled program. A configuration: its rule
    likewise, for its own kind of drafts and vocabulary; its drafter's draws beside the laws that it
    recorded; and its texts beside those of plain decoding, greedy and drawn.

    Args:
      rules: a name in ``RULES``, a ``Rule``, the dotted path of one, or several of these; () for
        all lossless ones. Without ``model``.
      vocab_size: of the compiled rules' rounds; None for 16. Without ``model``.
      tree: of the enumerated drafts, as in ``law``. Without ``model``.
      model: of the target, as for ``LLM``; None to certify rules.
      speculative_config: as for ``LLM``. With ``model``, and so are those up to ``deterministic``.
      prompts: as for ``LLM.generate``; None for a few of jspec's.
      max_tokens: to continue each prompt by; None for 64.
      dtype: as for ``LLM``.
      num_drafts: rounds whose draws are compared with the recorded laws; None for 4096.
      deterministic: as for ``LLM``.
      temperature: of what is drawn, more than 0. None, if all four are: several combinations for
        rules, and 0.8 with ``model``.
      top_k: as in ``SamplingParams``; None for its default.
      top_p: as in ``SamplingParams``; None for its default.
      min_p: as in ``SamplingParams``; None for its default.
      seed: of the noise, and of random laws.
      progress: is told what is being done.

    Returns:
      The report: ``report.passed``, ``report.findings``, ``report.save(path)``.

    Raises:
      ValueError: a rule is not there, an argument is out of range or goes with the other kind of
        certificate, or ``LLM`` would refuse the configuration.
    """
    device = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
    }
    filters = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    filters = {name: value for name, value in filters.items() if value is not None}
    run = {
        "prompts": prompts,
        "max_tokens": max_tokens,
        "dtype": dtype,
        "num_drafts": num_drafts,
        "deterministic": deterministic or None,
    }
    run = {name: value for name, value in run.items() if value is not None}
    if model is None:
        config = {} if speculative_config is None else {"speculative_config": speculative_config}
        _refuse(config | run, "is of a model; give model=... as well, or leave it out.")
        chosen = (rules,) if isinstance(rules, str | Rule) else tuple(rules)
        size = VOCAB_SIZE if vocab_size is None else vocab_size
        names = ", ".join(rule_of(rule).name for rule in chosen) or "all lossless ones"
        progress("enumerating drafts and coins, counting tokens")
        found = tuple(findings(chosen, vocab_size=size, tree=tree, seed=seed, **filters))
        return Report(found, {"rules": names, **device, "vocab_size": str(size)})
    given = {"rules": rules or None, "vocab_size": vocab_size, "tree": tree}
    given = {name: value for name, value in given.items() if value is not None}
    _refuse(given, "is of certificates of rules; here model and speculative_config say it.")
    asked = Asked(model, speculative_config, sampling={**filters, "seed": seed}, **run)
    loading.keep_compiled_programs()
    found, remarks, setting = certified(asked, progress)
    return Report(tuple(found), {**setting, **device}, tuple(remarks))


def findings(
    rules: Sequence[str | Rule] = (),
    *,
    vocab_size: int = VOCAB_SIZE,
    tree: Sequence[int] | None = None,
    seed: int = 0,
    **filters: float,
) -> Iterator[Finding]:
    """What ``certify`` reports of rules, one by one as it is found."""
    chosen = [rule_of(rule) for rule in rules]
    for rule in chosen or [rule for rule in RULES.values() if rule.lossless]:
        yield from distributions(rule, tree, seed, **filters)
        if rule.lossless:
            yield from chi_squares(rule, vocab_size, seed=seed, **filters)


def _refuse(needless: Mapping[str, Any], why: str) -> None:
    for name, value in needless.items():
        raise ValueError(f"{name}={value!r} {why}")
