"""The measurement of ``jspec bench``: every method beside plain decoding, in turns."""

import contextlib
import dataclasses
import functools
import itertools
import operator
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax

from jspec.api import config
from jspec.api.backends import Backends
from jspec.api.build import build_plan
from jspec.api.llm import LLM
from jspec.checkpoints import loading
from jspec.checkpoints.loading import LoadedModel
from jspec.tools.bench import costs, peer
from jspec.tools.bench.contenders import PLAIN, Case, Ours, by_category, filled
from jspec.tools.bench.names import names_of, portable, with_weights
from jspec.tools.bench.peer import Peer, PeerError, Theirs
from jspec.tools.bench.questions import Question, Request, answered_by
from jspec.tools.bench.settings import CommonSettings, Settings
from jspec.tools.bench.timing import Contender, Sample, joined, race, ratios, spread

# The name of every peer of a case, and the peer itself.
PeersOfCase = Callable[[Case, dict[str, list[Request]]], Iterable[tuple[str, Theirs]]]
Peers = contextlib.AbstractContextManager[PeersOfCase | None]

DEFINITION = (
    "acceptance length: tokens emitted by a pass of the target, the bonus token and passes without "
    "a draft included; 1 is no gain. per position: of all drafts, the share whose i-th token was "
    "accepted. speed-up: tokens/s relative to plain decoding in the same turn, median (least to "
    "most); prompts and host included."
)


def bench(
    model: str | os.PathLike | LoadedModel,
    questions: Sequence[Question],
    settings: Settings,
    *,
    peers: Callable[[LoadedModel, dict[str, Any]], Peers] | None = None,
    on_case: Callable[[dict[str, Any]], None] = lambda _: None,
    on_step: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Measure all methods; return the results as their JSON file holds them.

    Args:
      model: the target, as in ``LLM``.
      questions: from ``questions.read``.
      settings: methods, cases and repeats.
      peers: makes the peers of the loaded target, and notes in the results' "peer" which they are;
        None for transformers.
      on_case: called with the results so far after each case.
      on_step: called with the words of a progress line.

    Raises:
      ValueError: the model, a config and the questions do not fit together.
    """
    on_step("loading")
    for name in settings.quantizations:  # Errors come before anything is loaded.
        loading.outline(model, settings.dtype, name)
    target = loaded(model, settings)
    forms = {name: loaded(model, settings, name) for name in settings.quantizations}
    plain = LLM(target, **settings.split)
    backends = Backends(settings.attention_backend, settings.sampling_backend)
    for given in settings.configs:  # errors of the last config must not come after hours
        for each in (target, *forms.values()):
            build_plan(each, config.read(given), dtype=settings.dtype, backends=backends)
    asked, left_out = answered_by(
        plain, questions, max_tokens=settings.max_tokens, prompt_tokens=settings.prompt_tokens
    )
    requests = by_category(asked)
    configs = [portable(given, settings.configs) for given in settings.configs]
    results: dict[str, Any] = {
        "definition": DEFINITION,
        "setting": dataclasses.asdict(settings) | {"configs": configs},
        "questions": {name: len(some) for name, some in requests.items()},
        "left_out": left_out,
        "peer": None,
        "interrupted": False,
        "rows": [],
    }
    peers = peers or functools.partial(_transformers, model, settings)
    with peers(target, results) as field:
        for case in settings.cases:
            table = CaseTable({None: target} | forms, settings, case, requests, field)
            try:
                table.run(on_step)
            except KeyboardInterrupt:
                results["interrupted"] = True
            results["rows"] += table.rows()
            for name, reason in table.failed.items():
                results["peer"] += f"; {case.title}: {name} failed ({reason})"
            if results["rows"]:  # none if Ctrl-C comes before the first sample
                on_case(results)
            if results["interrupted"]:
                break
    return results


def loaded(
    model: str | os.PathLike | LoadedModel,
    settings: CommonSettings,
    quantization: str | None = None,
) -> LoadedModel:
    """Return the target; one that devices split is loaded to the host, as one may not hold it."""
    host = contextlib.nullcontext()
    if settings.tensor_parallel_size > 1:
        host = jax.default_device(jax.local_devices(backend="cpu")[0])
    with host:
        return loading.load(model, settings.dtype, quantization=quantization)


@contextlib.contextmanager
def _transformers(
    model: Any, settings: Settings, target: LoadedModel, results: dict
) -> Iterator[PeersOfCase | None]:
    """Yield transformers with the model loaded, or None; ``results["peer"]`` says which."""
    dtype = target.params.embedding.dtype.name
    refusal = peer.refusal(model, dtype) if settings.peers else "not asked for"
    draft = settings.draft_folder
    try:
        worker = None if refusal else peer.Peer(model, draft, dtype)
    except PeerError as error:
        worker, refusal = None, f"transformers cannot load the models ({error})"
    if worker is None:
        results["peer"] = refusal
        yield None
        return
    with worker:
        versions = "transformers {transformers}, torch {torch}".format_map(worker.info)
        results["peer"] = f"{versions}, {dtype}"
        if draft is None:
            results["peer"] += "; assisted generation needs a draft_model in a local directory"
        yield lambda case, requests: _modes(worker, target, settings, case, requests)


def _modes(
    worker: Peer, target: LoadedModel, settings: Settings, case: Case, requests: dict
) -> Iterator[tuple[str, Theirs]]:
    for mode, name in peer.MODES.items():
        same = peer.settings_of(mode, settings.configs)
        if same is None or (mode == "assisted" and settings.draft_folder is None):
            continue
        if mode == "eager" or case.batch_size == 1:  # all that transformers supports
            yield name, Theirs(worker, mode, case, requests, same, target.eos_token_ids)


class CaseTable:
    """The contenders of one case and their samples."""

    def __init__(
        self,
        targets: Mapping[str | None, LoadedModel],  # by quantization
        settings: Settings,
        case: Case,
        requests: Mapping[str, Sequence[Request]],
        peers: PeersOfCase | None,
    ):
        self._targets, self._settings, self._case, self._peers = targets, settings, case, peers
        self._questions = {name: len(some) for name, some in requests.items()}
        together = case.batch_size * settings.data_parallel_size
        self._requests = {name: filled(some, together) for name, some in requests.items()}
        self.failed: dict[str, str] = {}  # contenders of the peer, and the reasons
        self._facts: dict[str, dict[str, Any]] = {}
        self._first: dict[str, Sample] = {}
        self._field: list[Contender] = []

    def run(self, on_step: Callable[[str], None]) -> None:
        """Compile and warm up all contenders, race them, and take their rounds apart."""
        for name, run, facts in self._contenders():
            on_step(f"{self._case.title}: compiling {name}")
            begin = time.perf_counter()
            try:
                self._first[name] = run()
            except PeerError as error:
                self.failed[name] = str(error)
                continue
            seconds = time.perf_counter() - begin
            self._facts[name] = facts | {"first_call_seconds": seconds}
            self._field.append(Contender(name, run))
        on_step(f"{self._case.title}: measuring")
        try:
            race(self._field, self._settings.repeats, self._settings.patience)
        finally:
            self.failed |= {each.name: each.failed for each in self._field if each.failed}
        for each in self._field:
            if isinstance(each.run, Ours):
                on_step(f"{self._case.title}: timing the parts of {each.name}")
                self._facts[each.name] |= costs.measure(each.run)

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each contender with a sample; none if plain decoding has none."""
        field = [each for each in self._field if each.samples]
        if not field or field[0].name != PLAIN:
            return []
        rows = []
        for each in field:
            row = row_of(self._case, each, field[0], self._questions) | self._facts[each.name]
            if self._case.temperature == 0:
                plain = self._first[with_weights(PLAIN, row.get("quantization"))]
                row |= _equality(self._first[each.name].tokens, plain.tokens)
            if isinstance(each.run, Ours):
                row |= acceptance_of(each.run, row["categories"])
            else:
                row |= _of_peer(each, field, row["categories"])
            rows.append(row)
        return rows

    def _contenders(self) -> Iterator[tuple[str, Ours | Theirs, dict[str, Any]]]:
        """Yield each name, its contender and the facts of its row."""
        settings, case, names = self._settings, self._case, set()
        named = zip((None, *settings.configs), (PLAIN, *names_of(settings.configs)), strict=True)
        for (quantization, target), (given, name) in itertools.product(
            self._targets.items(), list(named)
        ):
            llm = LLM(
                target,
                given,
                dtype=settings.dtype,
                max_num_seqs=case.batch_size,
                attention_backend=settings.attention_backend,
                sampling_backend=settings.sampling_backend if given else None,
                data_parallel_size=settings.data_parallel_size,
                **settings.split,
            )
            name = with_weights(name, quantization)
            while name in names:
                name += "'"
            names.add(name)
            facts = {"config": given and portable(given, settings.configs)}
            facts |= {"quantization": quantization} if quantization else {}
            yield name, Ours(llm, case, self._requests), facts
        for name, run in self._peers(case, self._requests) if self._peers else ():
            yield name, run, {"config": dict(run.settings)}


def row_of(
    case: Case, each: Contender, plain: Contender, questions: Mapping[str, int]
) -> dict[str, Any]:
    """Return the speeds of a contender; ``questions`` counts them by category."""
    categories = {}
    for name, count in questions.items():
        part, plain_part = (
            dataclasses.replace(some, samples=[sample.parts[name] for sample in some.samples])
            for some in (each, plain)
        )
        categories[name] = {
            "questions": count,
            "requests": len(part.samples[0].tokens),
            "tokens_per_second": part.median,
            "speedup": statistics.median(ratios(part, plain_part)),
        }
    return {
        "batch_size": case.batch_size,
        "temperature": case.temperature,
        "name": each.name,
        "tokens_per_second": spread(each.speeds),
        "speedup": spread(ratios(each, plain)),
        "categories": categories,
        "distinct_tokens": statistics.mean(len(set(text)) for text in each.samples[0].tokens),
        "seconds": [sample.seconds for sample in each.samples],
        "quiet_samples": each.num_quiet,
    }


def _equality(texts: Sequence[list[int]], expected: Sequence[list[int]]) -> dict[str, Any]:
    """Return the number of equal texts, and where the others differ first, on average."""
    pairs = list(zip(texts, expected, strict=True))
    first = [_first_difference(text, other) for text, other in pairs if text != other]
    return {
        "texts_equal_to_plain": len(pairs) - len(first),
        "texts": len(pairs),
        "mean_first_difference": statistics.mean(first) if first else None,
    }


def _first_difference(text: list[int], other: list[int]) -> int:
    """Return the first position at which two texts differ; the end of one may be it."""
    unequal = (i for i, (a, b) in enumerate(zip(text, other, strict=False)) if a != b)
    return next(unequal, min(len(text), len(other)))


def _of_peer(
    each: Contender, field: Sequence[Contender], categories: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """Return jspec's speed relative to a peer that does the same, and the passes it counted."""
    facts: dict[str, Any] = {}
    for ours in field:
        if ours.name == each.run.counterpart:
            facts |= {"ours": ours.name, "ours_over_theirs": spread(ratios(ours, each))}
    counts = each.run.counts
    for name, sample in counts.items():
        categories[name]["acceptance_length"] = sample.num_tokens / sample.passes
    if counts:
        whole = joined(list(counts.values()))
        facts["acceptance_length"] = whole.num_tokens / whole.passes
    return facts


def acceptance_of(run: Ours, categories: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the acceptance of a contender's last run; add that of each category."""
    for name, counts in run.counts.items():
        categories[name]["acceptance_length"] = counts.tokens_per_pass
    counts = functools.reduce(operator.add, run.counts.values())
    return {
        "acceptance_length": counts.tokens_per_pass,
        "mean_acceptance_length": counts.mean_acceptance_length,
        "acceptance_per_position": list(counts.acceptance_per_pos),
    }
