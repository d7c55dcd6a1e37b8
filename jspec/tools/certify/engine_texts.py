"""The check "engine": texts of sequences that share an engine, and those of each sequence alone.

They arrive one by one in a few slots. With pages they also run on a cold and on a warm prefix
cache, and are preempted now and then. As in the check "text", ``rounding`` separates near-ties
from errors.
"""

import collections
import dataclasses
import itertools
from collections.abc import Callable, Sequence

from jspec.core.types import Params
from jspec.engine import memory, pages
from jspec.engine.answers import Answer
from jspec.engine.engine import Engine
from jspec.engine.pages import PAGE_SIZE, Pool
from jspec.engine.plan import Plan
from jspec.engine.sequences import SequenceParams
from jspec.tools.certify.report import Finding
from jspec.tools.certify.texts import compared, with_target_noise

_SLOTS = 4
_ROUNDS = 4  # rounds of a launch: few, so that sequences join in the middle of others
_STEM = 2 * PAGE_SIZE + 1  # tokens that prompts begin with, so that they have pages to share


def engine_texts(
    plan: Plan,
    params: Params,
    rows: Sequence[SequenceParams],
    *,
    name: Callable[[int], str] = str,
) -> tuple[list[Finding], list[str]]:
    """Compare texts in a shared engine with those of each sequence alone.

    Sampled rows are compared under a rule with the target's noise, as ``texts`` does. Short prompts
    are lengthened by the other ones.

    Returns:
      The findings, and remarks on what could not be compared.

    Raises:
      ValueError: a row does not fit the model.
    """
    plan, remark = with_target_noise(plan)
    remarks = [remark] if remark else []
    rows = _lengthened(rows, plan.target.max_positions)
    capacity = max(len(row.prompt) + row.max_tokens for row in rows)
    alone = [Engine(plan, params, num_slots=1, capacity=capacity).run([row])[0] for row in rows]

    def finding(how: str, answers: list[Answer]) -> Finding:
        return compared(plan, params, rows, (alone, answers), ("alone", how), name, "engine")

    if not pages.reads_pages(plan):
        only = Engine(plan, params, num_slots=_SLOTS, capacity=capacity)
        part = f"{type(plan.target).__name__} with {type(plan.drafter).__name__}"
        remarks.append(f"{part} reads no pages: prefixes and preemptions were not compared.")
        return [finding("batched", _arriving(only, rows))], remarks

    def engine() -> Engine:
        count, dtype = -(-capacity // PAGE_SIZE) * len(rows) + 1, memory.dtype_of_pages(params)
        pool = Pool(plan, params, num_pages=count, dtype=dtype)  # as of LLM
        return Engine(plan, params, num_slots=_SLOTS, capacity=capacity, pool=pool)

    first = engine()
    findings = [finding("batched, cold", _arriving(first, rows))]
    hits = first.pool.blocks.hits
    findings.append(finding("batched, warm", _arriving(first, rows)))
    if first.pool.blocks.hits == hits and first.pool.blocks.shares_prefixes:
        remarks.append("no prompt fills a page: warm prefixes were not compared.")
    findings.append(finding("batched, preempted", _arriving(engine(), rows, preempting=True)))
    return findings, remarks


def _lengthened(rows: Sequence[SequenceParams], most: int) -> list[SequenceParams]:
    """Begin every prompt with the prompts of all, if one has too few tokens to share a page."""
    room = most - max(len(row.prompt) + row.max_tokens for row in rows)
    if min(len(row.prompt) for row in rows) >= _STEM or room <= 0:
        return list(rows)
    stem = sum((row.prompt for row in rows), ())
    stem = (stem * (_STEM // len(stem) + 1))[: min(_STEM, room)]
    return [dataclasses.replace(row, prompt=stem + row.prompt) for row in rows]


def _arriving(
    engine: Engine, rows: Sequence[SequenceParams], *, preempting: bool = False
) -> list[Answer]:
    """Run sequences that arrive one by one; return the answers.

    Raises:
      Exception: that ended a sequence.
    """
    tickets, waiting = [], collections.deque(rows)
    for number in itertools.count(1):
        if waiting:
            tickets.append(engine.submit(waiting.popleft(), rounds=_ROUNDS))
        elif engine.is_idle:
            break
        engine.step()
        if preempting and number % 3 == 0:
            engine.preempt()  # reads what is not read
            engine.preempt()
    for ticket in tickets:
        if ticket.error is not None:
            raise ticket.error
    return [ticket.answer for ticket in tickets]
