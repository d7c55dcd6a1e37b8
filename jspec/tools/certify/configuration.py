"""The certificate of a configuration of ``LLM``: its rule, its drafter's draws and its texts."""

import dataclasses
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jspec.api import config
from jspec.api.backends import Backends
from jspec.api.build import Build, build_plan
from jspec.api.engine_args import EngineArgs
from jspec.api.prompts import read
from jspec.checkpoints import loading
from jspec.checkpoints.loading import LoadedModel
from jspec.core.types import Params
from jspec.engine import programs
from jspec.engine.plan import Plan
from jspec.engine.sequences import SequenceParams, check_prompt
from jspec.sharding import mesh as mesh_lib
from jspec.tools.certify.drafters import NUM_DRAFTS, check_number, drafts, draws_tokens
from jspec.tools.certify.engine_texts import engine_texts
from jspec.tools.certify.exact import distribution, distributions, rule_of
from jspec.tools.certify.kernels import can_interpret
from jspec.tools.certify.report import Finding
from jspec.tools.certify.sampled import chi_square
from jspec.tools.certify.texts import texts, with_target_noise

# Of several kinds: repetition, code and prose are drafted with different success.
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
TEMPERATURE = 0.8  # the default
Progress = Callable[[str], None]


def of_model(
    model: str | os.PathLike | LoadedModel,
    speculative_config: Mapping[str, Any],
    progress: Progress,
    sampling: Mapping[str, Any],
    *,
    prompts: Any = None,
    max_tokens: int = 64,
    dtype: str | None = None,
    num_drafts: int = NUM_DRAFTS,
    engine: bool = False,
    **settings: Any,
) -> tuple[list[Finding], list[str], dict[str, str]]:
    """Certify a configuration; return the findings, remarks as ``of_plan``, and the setting.

    Arguments are those of ``certify``, checked before any model is opened. ``sampling`` holds
    temperature, top_k, top_p, min_p and the seed, and ``settings`` those of ``EngineArgs`` that
    were given.

    Raises:
      ValueError: a value is out of range, a prompt does not fit the model, or as ``LLM`` does.
    """
    if not isinstance(speculative_config, Mapping):
        raise ValueError(
            f"speculative_config={speculative_config!r} must be a mapping that names a drafter, "
            "such as {'method': 'ngram', 'num_speculative_tokens': 4}."
        )
    check_number(num_drafts)
    args = EngineArgs(**settings)
    row = SequenceParams((0,), max_tokens=max_tokens, **{"temperature": TEMPERATURE, **sampling})
    if not row.temperature > 0:
        raise ValueError(
            f"temperature={row.temperature} must be more than 0: greedy texts are compared in any "
            "case, and it is the temperature of sampled texts."
        )
    speculative = config.read(speculative_config)
    speculative.check_tensor_parallel(args.tensor_parallel_size)
    programs.keep_compiled_programs()
    progress("loading")
    build = build_plan(
        model,
        speculative,
        dtype=dtype,
        deterministic=args.deterministic,
        quantization=args.quantization,
        backends=Backends(sampling=args.sampling_backend, kv_cache_dtype=args.kv_cache_dtype),
        mesh=mesh_lib.make(args.tensor_parallel_size),
        expert_parallel=args.enable_expert_parallel,
    )
    eos = build.model.eos_token_ids
    rows = [
        dataclasses.replace(row, prompt=tuple(prompt), stream=index, stop_token_ids=eos)
        for index, prompt in enumerate(_token_ids(build, prompts, max_tokens))
    ]
    findings, remarks = of_plan(
        build.plan,
        build.params,
        rows,
        num_drafts=num_drafts,
        engine=engine,
        name=_namer(build),
        progress=progress,
    )
    dtypes = {str(x.dtype) for x in jax.tree.leaves(build.params.target) if x.ndim > 1}
    setting = {
        "model": str(build.model.path),
        "dtype": ", ".join(sorted(dtypes)),
        "speculative_config": json.dumps(dict(speculative_config), default=str),
        "prompts": str(len(rows)),
        "max_tokens": str(max_tokens),
        **{name: str(value) for name, value in settings.items()},
        "temperature": f"{row.temperature:g}",
        **{name: f"{value:g}" for name, value in sampling.items()},
    }
    return findings, remarks, setting


def of_plan(
    plan: Plan,
    params: Params,
    rows: Sequence[SequenceParams],
    *,
    num_drafts: int = NUM_DRAFTS,
    engine: bool = False,
    name: Callable[[int], str] = str,
    progress: Progress = lambda _: None,
) -> tuple[list[Finding], list[str]]:
    """Certify a plan; return the findings, and remarks on checks that were left out.

    Rows have a temperature above 0; greedy texts have the same prompts. The draws of ``num_drafts``
    rounds are compared. ``engine`` adds texts of sequences that share an engine. ``name`` shows a
    token to people, ``progress`` receives the name of a step.

    Raises:
      ValueError: a row does not fit the model.
    """
    progress("enumerating drafts and uniforms, counting tokens of the rule")
    findings = _of_rule(plan, rows[0])
    with mesh_lib.on(mesh_lib.of(params)):
        more, remarks = _of_engine(plan, params, rows, num_drafts, engine, name, progress)
    return findings + more, remarks


def _of_engine(
    plan: Plan,
    params: Params,
    rows: Sequence[SequenceParams],
    num_drafts: int,
    engine: bool,
    name: Callable[[int], str],
    progress: Progress,
) -> tuple[list[Finding], list[str]]:
    """Return what ``of_plan`` does, but for the rule."""
    remarks = []
    progress("comparing drafts with their distributions")
    findings = list(drafts(plan, params, rows, num_drafts=num_drafts))
    if not findings[0].passed and len(findings) == 1:
        remarks.append(f"texts were not compared: {findings[0].note or 'drafts are malformed'}.")
        return findings, remarks
    if not draws_tokens(plan):
        remarks.append(_without_draws(plan))
    progress("comparing greedy texts with plain decoding")
    # Filters would change nothing at temperature 0.
    greedy = [dataclasses.replace(row, temperature=0, top_k=0, top_p=1, min_p=0) for row in rows]
    findings.append(texts(plan, params, greedy, name=name))
    progress("comparing sampled texts with plain sampling")
    plan, remark = with_target_noise(plan)
    remarks += [remark] if remark else []
    findings.append(texts(plan, params, rows, name=name))
    if engine:
        progress("comparing texts in a shared engine with those alone")
        mixed = [row for pair in zip(greedy, rows, strict=True) for row in pair]
        more, new = engine_texts(plan, params, mixed, name=name)
        findings += more
        remarks += new
    return findings, remarks


def _of_rule(plan: Plan, row: SequenceParams) -> list[Finding]:
    rule, proposal = rule_of(plan.rule), plan.drafter.proposal
    if not rule.lossless:
        return list(distributions(rule))
    filters = {name: getattr(row, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    backend = plan.sampling_backend
    # Where the kernel cannot be interpreted, the walk of its rule is enumerated.
    enumerated = backend if backend is not None and can_interpret(backend) else None
    findings = [distribution(rule, proposal, backend=enumerated, **filters)]
    choices = {"chain": ("chain", "deterministic"), "deterministic": ("deterministic",)}
    choices = choices.get(proposal, ("without_replacement", "chain", "deterministic"))
    counted = next((each for each in choices if each in rule.exact_for), None)
    if counted is not None:
        vocab_size = plan.target.vocab_size
        finding = chi_square(rule, counted, vocab_size=vocab_size, backend=backend, **filters)
        findings.append(finding)
    return findings


def _without_draws(plan: Plan) -> str:
    name = type(plan.drafter).__name__
    if plan.drafter.noise == "target":
        return f"{name} draws with the target's noise and records nothing: its texts are compared."
    return f"{name} drafts deterministically: it has no draws to compare with a distribution."


def _token_ids(build: Build, prompts: Any, max_tokens: int) -> list[tuple[int, ...]]:
    if prompts is None and loading.tokenizer_if_any(build.model) is None:
        raise ValueError(
            f"{build.model.path} has no tokenizer for the prompts of jspec; give "
            "prompts={'prompt_token_ids': [...]} or a list of these."
        )
    prompts = list(PROMPTS) if prompts is None else prompts
    read_prompts = read(
        prompts, lambda text: (build.tokenizer or build.model.tokenizer).encode(text)
    )
    ids = [each.token_ids for each in read_prompts]
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
    tokenizer = loading.tokenizer_if_any(build.model)
    if tokenizer is None:
        return str
    return lambda token: f"{tokenizer.decode([token])!r} ({token})"
