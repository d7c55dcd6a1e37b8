"""The cover of tests/test_conformance.py on several devices; prints one JSON a case and number.

Its arguments are "few", or names of methods. Every other case splits the drafter too. Sequences
share pages and their first tokens, one follows a grammar, and pages run out.

tests/test_conformance_on_a_mesh.py runs this in a process where one CPU simulates eight devices.
"""

import dataclasses
import functools
import json
import sys

import jax

from tests import networks

# All networks here have so many heads, so that eight devices divide them.
HEADS = 8
_build = networks.build


def _with_more_heads(**sizes):
    """Return the config of a decoder with ``HEADS`` narrower heads."""
    wide = sizes["num_heads"] * sizes["head_dim"]
    return _build(**sizes | {"num_heads": HEADS, "head_dim": wide // HEADS})


if __name__ == "__main__":  # before the tiny networks are made, and in no process of pytest
    networks.build = _with_more_heads

from jspec.core.types import Params  # noqa: E402
from jspec.engine import functional as host  # noqa: E402
from jspec.engine import loop  # noqa: E402
from jspec.engine.engine import Engine  # noqa: E402
from jspec.engine.pages import Pool, reads_pages, without_prefix  # noqa: E402
from jspec.engine.plan import Plan  # noqa: E402
from jspec.grammar import automata  # noqa: E402
from jspec.models import partition  # noqa: E402
from jspec.models.decoder import Decoder  # noqa: E402
from jspec.sharding import mesh as mesh_lib  # noqa: E402
from tests import tiny  # noqa: E402
from tests.plain_processors import Spelling  # noqa: E402
from tests.test_conformance import COVER, DRAFTERS, SETTINGS, TEMPERATURES  # noqa: E402

SIZES = (2, 4, 8)
TOKENIZER, END = Spelling(("", "a", "b", "ab", "ba", "aa", "1", "2", "12", ":", "x")), 0
STEM = tuple(range(20, 29))
FEW = {"medusa": 8, "dspark": 4, "mtp": 2}  # numbers of devices


@functools.cache
def grammar():
    """Return the grammar of the second sequence."""
    return automata.compiled(r"(ab){9}b{12}", TOKENIZER, frozenset({END}), tiny.VOCAB)


def rows_of(kind):
    """Return sequences of different lengths that begin alike."""
    return [
        host.SequenceParams(
            (*STEM, 7 * i + 3),
            max_tokens=18 - 2 * i,
            temperature=temperature,
            stream=i,
            stop_token_ids=(END,) if i == 1 else (),
            grammar=grammar() if i == 1 else None,
        )
        for i, temperature in enumerate(TEMPERATURES[kind])
    ]


def split(drafter, weights, target, mesh, size):
    """Return a drafter for ``target``, and its weights on a mesh; ``size`` devices share them."""
    names = {field.name for field in dataclasses.fields(drafter)}
    if "parts" in names:
        pairs = zip(drafter.parts, weights, strict=True)
        parts, weights = zip(*(split(*pair, target, mesh, size) for pair in pairs), strict=True)
        return dataclasses.replace(drafter, parts=parts), weights
    config = drafter.config if "config" in names else None
    rules = partition.draft_rules(config, size)
    if "model" in names_of(weights):
        rules = {("model", *path): rule for path, rule in rules.items()}
    changes = {"target": target, "config": config and partition.split_draft(config, size)}
    drafter = dataclasses.replace(drafter, **{k: v for k, v in changes.items() if k in names})
    return drafter, partition.placed(weights, rules, mesh)


@functools.cache
def weights_of(method, tree):
    """Return the drafter's weights, which may be others at every call of their function."""
    return DRAFTERS[method][tree][1]()


def names_of(weights):
    """Return the names of the fields of weights."""
    return vars(weights) if dataclasses.is_dataclass(weights) else ()


def texts(case, mesh=None, draft_size=1):
    """Return the texts of a case, and whether sequences were preempted; None without pages."""
    method, tree, rule, kind = case
    (drafter, _), target = DRAFTERS[method][tree], tiny.TARGET
    params = Params(tiny.params().target, weights_of(method, tree))
    if mesh is not None:
        size = mesh_lib.size_of(mesh)
        whole, target = target.config, Decoder(partition.split(target.config, size))
        drafter, of_drafter = split(drafter, params.drafter, target, mesh, draft_size)
        on_mesh = partition.placed(params.target, partition.rules(whole, size), mesh)
        params = Params(on_mesh, of_drafter)
    plan = Plan(target, drafter, SETTINGS[rule], node_buckets=(drafter.tree_size,))
    with mesh_lib.on(mesh):
        pool = Pool(plan, params, num_pages=6, page_size=8) if reads_pages(plan) else None
        engine = Engine(
            plan, params, num_slots=2, capacity=40, pool=pool, shared=loop.init_shared(plan)
        )
        tickets = [engine.submit(row, rounds=2) for row in rows_of(kind)]
        while not engine.is_idle:
            engine.step()
    assert all(ticket.error is None for ticket in tickets), [each.error for each in tickets]
    was_preempted = None
    if pool is not None:
        was_preempted = any(each.num_preemptions for each in tickets)
        assert pool.blocks.hits or without_prefix(plan)
    return [ticket.answer.tokens.tolist() for ticket in tickets], was_preempted


def cases_of(given):
    """Yield the cases of some methods, and the numbers of devices of each."""
    for method in FEW if given == ["few"] else given:
        cases = [case for case in COVER if case[0] == method and (case[0], case[2]) != _NONE]
        for index, case in enumerate(cases[:1] if given == ["few"] else cases):
            yield index, case, (FEW[method],) if given == ["few"] else SIZES


# Refused by plans.
_NONE = "none", "synthetic"


def main():
    for index, case, sizes in cases_of(sys.argv[1:]):
        one, was_preempted = texts(case)
        for size in sizes:
            several, _ = texts(case, mesh_lib.make(size), 1 if index % 2 else size)
            line = {"case": [*case, size], "one": one, "several": several}
            print(json.dumps(line | {"preempted": was_preempted}), flush=True)
        jax.clear_caches()


if __name__ == "__main__":
    main()
