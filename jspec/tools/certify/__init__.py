"""Proofs and measurements, for users, that speculation keeps the target's distribution."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jaxlib

from jspec import ops
from jspec.checkpoints.loading import LoadedModel
from jspec.tools.certify.configuration import Progress, of_model, of_plan
from jspec.tools.certify.drafters import drafts
from jspec.tools.certify.exact import distribution, distributions, rule_of
from jspec.tools.certify.kernels import can_interpret
from jspec.tools.certify.report import Finding, Report
from jspec.tools.certify.sampled import VOCAB_SIZE, chi_square, chi_squares
from jspec.tools.certify.texts import texts
from jspec.verify import RULES, Rule, check_backend

__all__ = [
    "Finding",
    "Report",
    "certify",
    "chi_square",
    "distribution",
    "distributions",
    "drafts",
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
    quantization: str | None = None,
    kv_cache_dtype: str | None = None,
    num_drafts: int | None = None,
    deterministic: bool = False,
    engine: bool = False,
    tensor_parallel_size: int = 1,
    enable_expert_parallel: bool = False,
    sampling_backend: str | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: int = 0,
    progress: Progress = lambda _: None,
) -> Report:
    """Certify acceptance rules, or a configuration of ``LLM``. See docs/losslessness.md.

    Rules: exact distributions by enumeration, and token counts of the compiled program. A
    configuration: the same for its rule, with its own proposal and vocabulary; its drafter's draws
    against the recorded distributions; and its texts, greedy and sampled, against plain decoding.
    ``engine`` adds the texts of sequences that share slots, pages and prefixes.

    Args:
      rules: a name in ``RULES``, a ``Rule``, the dotted path of one, or several of these; () for
        all lossless ones. Without ``model``.
      vocab_size: of the compiled rules' rounds; None for 16. Without ``model``.
      tree: of the enumerated drafts, as in ``distribution``. Without ``model``.
      model: of the target, as for ``LLM``; None to certify rules.
      speculative_config: as for ``LLM``. With ``model``, like all arguments to
        ``enable_expert_parallel``.
      prompts: as for ``LLM.generate``; None for jspec's own.
      max_tokens: of each continuation; None for 64.
      dtype, quantization, kv_cache_dtype: as for ``LLM``.
      num_drafts: rounds whose draws are compared; None for 4096.
      engine: whether to compare texts in a shared engine with those of each sequence alone.
      deterministic, tensor_parallel_size, enable_expert_parallel: as for ``LLM``.
      sampling_backend: as for ``LLM``. Without ``model``: the rules "rejection" and "block" by its
        kernel, interpreted on a device that does not run it.
      temperature: of sampled texts, more than 0. If all four are None: several combinations for
        rules, and 0.8 with ``model``.
      top_k, top_p, min_p: as in ``SamplingParams``; None for its default.
      seed: of the noise, and of random distributions.
      progress: receives the name of each step.

    Returns:
      The report: ``report.passed``, ``report.findings``, ``report.save(path)``.

    Raises:
      ValueError: a rule does not exist, an argument is out of range or belongs to the other kind
        of certificate, or ``LLM`` would refuse the configuration.
    """
    filters = _set(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    run = _set(prompts=prompts, max_tokens=max_tokens, dtype=dtype, num_drafts=num_drafts)
    run |= _set(quantization=quantization, kv_cache_dtype=kv_cache_dtype)
    run |= _set(deterministic=deterministic or None, engine=engine or None)
    run |= {"tensor_parallel_size": tensor_parallel_size} if tensor_parallel_size != 1 else {}
    run |= _set(enable_expert_parallel=enable_expert_parallel or None)
    if model is None:
        misplaced = _set(speculative_config=speculative_config) | run
        _refuse(misplaced, "is of a model; give model=... as well, or leave it out.")
        progress("enumerating drafts and uniforms, counting tokens")
        report = _of_rules(rules, vocab_size, tree, seed, sampling_backend, filters)
        return _on_this_device(report)
    _refuse(
        _set(rules=rules or None, vocab_size=vocab_size, tree=tree),
        "is of certificates of rules; a model has its own, so leave it out.",
    )
    sampling, run = {**filters, "seed": seed}, run | _set(sampling_backend=sampling_backend)
    findings, remarks, setting = of_model(model, speculative_config, progress, sampling, **run)
    return _on_this_device(Report(tuple(findings), setting, tuple(remarks)))


def _on_this_device(report: Report) -> Report:
    """Return a report that names the device and the versions that it was made with."""
    kind = jax.devices()[0].device_kind
    device = {"device": kind, "jax": jax.__version__, "jaxlib": jaxlib.__version__}
    return dataclasses.replace(report, setting={**report.setting, **device})


def _of_rules(
    rules: str | Rule | Sequence[str | Rule],
    vocab_size: int | None,
    tree: Sequence[int] | None,
    seed: int,
    backend: str | None,
    filters: Mapping[str, float],
) -> Report:
    chosen = [rule_of(rule) for rule in ([rules] if isinstance(rules, str | Rule) else rules)]
    if backend is not None and not chosen:
        chosen = [RULES[name] for name in ops.REJECTION_SAMPLING_RULES]
    names = ", ".join(rule.name for rule in chosen) or "all lossless ones"
    size, findings = VOCAB_SIZE if vocab_size is None else vocab_size, []
    remarks, enumerated = (), backend is None or can_interpret(backend)
    if not enumerated:
        remarks = (f"drafts by {backend} are counted alone: JAX cannot interpret it.",)
    for rule in chosen or [rule for rule in RULES.values() if rule.lossless]:
        check_backend(rule, backend)
        if enumerated:
            findings += distributions(rule, tree, seed, backend, **filters)
        if rule.lossless:
            findings += chi_squares(rule, size, seed=seed, backend=backend, **filters)
    setting = {"rules": names, **_set(sampling_backend=backend), "vocab_size": str(size)}
    return Report(tuple(findings), setting, remarks)


def _set(**arguments: Any) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if value is not None}


def _refuse(misplaced: Mapping[str, Any], why: str) -> None:
    for name, value in misplaced.items():
        raise ValueError(f"{name}={value!r} {why}")
