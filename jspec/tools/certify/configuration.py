"""A whole configuration, as ``LLM`` would run it: its rule, its drafter's draws and its texts."""

import dataclasses
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jspec.api import config, prompts
from jspec.api.build import Build, build_plan
from jspec.core.types import Params
from jspec.engine import loading
from jspec.engine.loading import LoadedModel
from jspec.engine.plan import Plan
from jspec.engine.sequences import SequenceParams, check_prompt
from jspec.tools.certify.distribution import distribution, distributions, rule_of
from jspec.tools.certify.drafters import NUM_DRAFTS, check_number, drafts, draws_tokens
from jspec.tools.certify.report import Finding
from jspec.tools.certify.sampled import chi_square
from jspec.tools.certify.texts import texts, with_the_targets_noise

# Of several kinds, since texts that repeat themselves, code and prose are drafted unlike well.
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a village by the sea, there lived",
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12,",
    "import os\nimport sys\n\n\ndef main():\n    for path in sys.argv[1:]:\n        ",
    'Question: Why is the sky blue?\nAnswer: "',
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "The cat sat on the mat. The cat sat on the mat. The cat sat on the",
)
MAX_TOKENS = 64
TEMPERATURE = 0.8  # where none is given
Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Asked:
    """What is to be certified, checked before any model is opened.

    Attributes:
      model: of the target: a directory, a hub id, or what ``jspec.load`` returned.
      speculative_config: as for ``LLM``.
      prompts: as for ``LLM.generate``; None for ``PROMPTS``.
      max_tokens: to continue each of them by.
      dtype: as for ``LLM``.
      num_drafts: rounds whose draws are compared.
      deterministic: as for ``LLM``.
      sampling: temperature, top_k, top_p and min_p of what is drawn, and the seed.

    Raises:
      ValueError: a value is out of range.
    """

    model: str | os.PathLike | LoadedModel
    speculative_config: Mapping[str, Any]
    prompts: Any = None
    max_tokens: int = MAX_TOKENS
    dtype: str | None = None
    num_drafts: int = NUM_DRAFTS
    deterministic: bool = False
    sampling: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        if not isinstance(self.speculative_config, Mapping):
            raise ValueError(
                f"speculative_config={self.speculative_config!r} must say what drafts for the "
                "model, such as {'method': 'ngram', 'num_speculative_tokens': 4}."
            )
        check_number(self.num_drafts)
        if not self.row((0,)).temperature > 0:
            raise ValueError(
                f"temperature={self.row((0,)).temperature} must be more than 0: greedy text is "
                "compared in any case, and this is of what is drawn."
            )

    def row(self, prompt: Sequence[int], **changes: Any) -> SequenceParams:
        """The row of a prompt, sampled."""
        given = {"max_tokens": self.max_tokens, "temperature": TEMPERATURE, **self.sampling}
        return SequenceParams(tuple(prompt), **{**given, **changes})


def certified(asked: Asked, say: Say) -> tuple[list[Finding], list[str], dict[str, str]]:
    """Everything about a configuration; ``say`` is told what is being done.

    Returns:
      The findings, remarks on what was not checked as asked, and what was certified.

    Raises:
      ValueError: as ``LLM`` does; or a prompt does not fit the model.
    """
    speculative = config.read(asked.speculative_config)
    say("loading")
    build = build_plan(
        asked.model, speculative, dtype=asked.dtype, deterministic=asked.deterministic
    )
    ids = _token_ids(build, asked.prompts, asked.max_tokens)
    eos = build.model.eos_token_ids
    sampled = [asked.row(prompt, stream=i, stop_token_ids=eos) for i, prompt in enumerate(ids)]
    findings, remarks = of_plan(
        build.plan,
        build.params,
        sampled,
        num_drafts=asked.num_drafts,
        name=_namer(build),
        say=say,
    )
    dtypes = {str(x.dtype) for x in jax.tree.leaves(build.params.target) if x.ndim > 1}
    setting = {
        "model": str(build.model.path),
        "dtype": ", ".join(sorted(dtypes)),
        "speculative_config": json.dumps(dict(asked.speculative_config), default=str),
        "prompts": str(len(ids)),
        "max_tokens": str(asked.max_tokens),
        **({"deterministic": "True"} if asked.deterministic else {}),
        "temperature": f"{asked.row((0,)).temperature:g}",
        **{name: f"{value:g}" for name, value in asked.sampling.items()},
    }
    return findings, remarks, setting


def of_plan(
    plan: Plan,
    params: Params,
    rows: Sequence[SequenceParams],
    *,
    num_drafts: int = NUM_DRAFTS,
    name: Callable[[int], str] = str,
    say: Say = lambda _: None,
) -> tuple[list[Finding], list[str]]:
    """The findings about a plan of the functional layer, and remarks on what was left out.

    Args:
      plan: target, drafter and rule.
      params: weights.
      rows: what to continue, at a temperature above 0; greedy texts are of the same prompts.
      num_drafts: rounds whose draws are compared.
      name: of a token, for people.
      say: is told what is being done.

    Raises:
      ValueError: a row does not fit the model.
    """
    findings, remarks = [], []
    say("enumerating drafts and coins, counting tokens of the rule")
    findings += _of_rule(plan, rows[0])
    say("comparing drafts with the laws that they were drawn from")
    drafted = list(drafts(plan, params, rows, num_drafts=num_drafts))
    findings += drafted
    if not drafted[0].passed and len(drafted) == 1:
        remarks.append(f"texts were not compared: {drafted[0].note or 'its drafts are no drafts'}.")
        return findings, remarks
    if not draws_tokens(plan):
        remarks.append(_undrawn(plan))
    say("comparing greedy texts with plain decoding")
    # The same filters as above would change nothing at temperature 0.
    greedy = [dataclasses.replace(row, temperature=0, top_k=0, top_p=1, min_p=0) for row in rows]
    findings.append(texts(plan, params, greedy, name=name))
    say("comparing sampled texts with plain sampling")
    same, remark = with_the_targets_noise(plan)
    remarks += [remark] if remark else []
    findings.append(texts(same, params, rows, name=name))
    return findings, remarks


def _of_rule(plan: Plan, row: SequenceParams) -> list[Finding]:
    """The law of the rule for the plan's drafts, and the counts of its compiled program."""
    rule, proposal = rule_of(plan.rule), plan.drafter.proposal
    if not rule.lossless:
        return list(distributions(rule))
    filters = {name: getattr(row, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    drawn = "chain" if proposal == "chain" else "without_replacement"
    counted = next(
        (
            each
            for each in (drawn, "chain", "point")
            if each in rule.exact_for and (proposal != "point" or each == "point")
        ),
        None,
    )
    found = [distribution(rule, proposal, **filters)]
    if counted is not None:
        found.append(chi_square(rule, counted, vocab_size=plan.target.vocab_size, **filters))
    return found


def _undrawn(plan: Plan) -> str:
    name = type(plan.drafter).__name__
    if plan.drafter.proposal == "pruned":
        return f"No law of the drafts of {name} is known, and its rule needs none."
    if plan.drafter.noise == "target":
        return f"{name} draws with the target's noise and records no law: its texts are compared."
    return (
        f"{name} draws nothing, its drafts are point masses: there is no law to compare them with."
    )


def _token_ids(build: Build, given: Any, max_tokens: int) -> list[tuple[int, ...]]:
    """The prompts as the model sees them, once they are found to fit it."""

    def encode(text: str) -> list[int]:
        tokenizer = build.tokenizer or build.model.tokenizer
        return tokenizer.encode(text)

    if given is None and loading.tokenizer_if_any(build.model) is None:
        raise ValueError(
            f"{build.model.path} has no tokenizer that could read the prompts of jspec; give "
            "prompts={'prompt_token_ids': [...]} or a list of these."
        )
    ids = [
        each.token_ids for each in prompts.read(list(PROMPTS) if given is None else given, encode)
    ]
    if not ids:
        raise ValueError("prompts=[] holds no prompt; give one, or leave it out.")
    size, room = build.plan.target.vocab_size, build.max_model_len - max_tokens
    for index, prompt in enumerate(ids):
        if len(prompt) > room:
            raise ValueError(
                f"prompt {index} has {len(prompt)} tokens and max_tokens={max_tokens}, but the "
                f"model has {build.max_model_len} positions; shorten one of the two."
            )
        check_prompt(index, prompt, size)
    return ids


def _namer(build: Build) -> Callable[[int], str]:
    """How to name a token to people."""
    tokenizer = loading.tokenizer_if_any(build.model)
    if tokenizer is None:
        return str
    return lambda token: f"{tokenizer.decode([token])!r} ({token})"
