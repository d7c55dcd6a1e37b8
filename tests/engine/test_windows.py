"""Sliding windows: layers give back the pages that no query sees any more; texts stay."""

import dataclasses

import jax
import numpy as np
import pytest

from jspec.drafters import DraftModel
from jspec.engine import functional as host
from jspec.engine import pages
from jspec.engine.block_kind import BlockKind
from jspec.engine.block_pool import BlockPool
from jspec.engine.block_table import BlockTable
from jspec.engine.engine import Engine
from jspec.engine.pages import Pool
from jspec.engine.plan import Plan
from jspec.models import decoder
from tests import networks, tiny
from tests.engine.test_pages import SCARCE, paged, run, sequences, texts

SLIDING = decoder.Decoder(networks.changed(tiny.TARGET.config, windows=(9, 6)))
MIXED = decoder.Decoder(networks.changed(tiny.TARGET.config, windows=(None, 6)))
SLIDING_DRAFT = DraftModel(networks.changed(tiny.DRAFT_CONFIG, windows=(9,)), 4)
LONG = decoder.Decoder(dataclasses.replace(MIXED.config, max_positions=1024))
WINDOWED = {  # target, drafter, the windows of the kinds of layers, and sizes of pages
    "ngram": (SLIDING, tiny.NGRAM, (9,), (1,)),
    "draft_model": (SLIDING, SLIDING_DRAFT, (9,), (3, 4)),
    "mixed": (MIXED, tiny.NGRAM, (None, 6), (1,)),
    "mixed with a draft_model": (MIXED, SLIDING_DRAFT, (None, 9), (4,)),
    "draft_model without windows": (SLIDING, tiny.DRAFT, (None, 9), (3,)),
}


@pytest.mark.parametrize("case", WINDOWED)
def test_texts_of_sliding_windows_are_the_same_while_pages_come_back(case):
    target, drafter, windows, sizes = WINDOWED[case]
    plan, params = Plan(target, drafter, "coupled"), tiny.params()
    rows = sequences()
    expected = [answer.tokens.tolist() for answer in host.generate_sequences(plan, params, rows)]
    for size in sizes:
        engine, most = paged(plan, params, 160, size), 0
        assert tuple(kind.window for kind in engine.pool.blocks.kinds) == windows
        for is_warm in (False, True):
            before = engine.pool.blocks.hits
            tickets = [engine.submit(row, rounds=1) for row in rows]
            while not engine.is_idle:
                engine.step()
                most = max([most, *(_num_held(ticket) for ticket in engine.scheduler.seated)])
            assert texts(tickets) == expected and engine.pool.blocks.num_used == 0
            assert engine.pool.blocks.hits > before + 20 or not is_warm
        # 9 seen tokens, and 3 launches of 5: being read, running and next.
        assert most <= -(-9 // size) + -(-15 // size) + 1
    scarce = paged(plan, params, SCARCE)
    tickets = run(scarce, rows, rounds=2)
    assert texts(tickets) == expected
    assert all(kind.num_free == SCARCE - 1 for kind in scarce.pool.blocks.kinds)


def _num_held(ticket):
    return sum(map(bool, ticket.table.pages[-1]))  # those of layers with windows


def test_a_prefix_is_shared_if_the_pages_that_its_first_query_sees_are_cached():
    pool = BlockPool([BlockKind(13, 2, window=4)], lookahead=1)
    table, text = BlockTable(pool), np.arange(20, dtype=np.int32)
    assert table.allocate(text[:12]) == 0
    table.advance(text, 11)
    assert [bool(page) for page in table.pages[0]] == [False] * 4 + [True] * 2
    table.free()
    BlockTable(pool).allocate(np.full(18, 50, np.int32))  # evicts all but the last of the text
    again = BlockTable(pool)
    assert again.allocate(text[:12]) == 10
    assert again.pages[0][:3] == [0, 0, 0] and all(again.pages[0][3:])


@pytest.mark.parametrize("is_scarce", [False, True])
def test_a_long_text_holds_few_pages_in_layers_with_a_window(is_scarce, monkeypatch):
    """Scarce pages are fewer than four prefills need, and no text has any before; some give way."""
    length, most_windowed = (200, 6) if is_scarce else (900, 40)
    if is_scarce:
        monkeypatch.setattr(BlockKind, "first_pages", lambda *given: given[-1])
        monkeypatch.setattr(BlockKind, "most_held", lambda *_: 0)
    plan, params = Plan(LONG, tiny.NGRAM, "coupled"), tiny.params()
    prompt = np.random.default_rng(3).integers(1, tiny.VOCAB, length).tolist()
    rows = [host.SequenceParams((*prompt, n), max_tokens=60) for n in range(3)]
    for seed in (4, 5, 6):
        other = np.random.default_rng(seed).integers(1, tiny.VOCAB, length)
        rows.append(host.SequenceParams(tuple(other.tolist()), max_tokens=60))
    expected = [answer.tokens.tolist() for answer in host.generate_sequences(plan, params, rows)]
    pool = Pool(plan, params, num_pages=80, page_size=64, most_windowed=most_windowed)
    engine = Engine(plan, params, num_slots=4, capacity=1024, shared=(), pool=pool)
    tickets, most = [engine.submit(row, rounds=4) for row in rows], 0
    while not engine.is_idle:
        engine.step()
        most = max([most, *(_num_held(ticket) for ticket in engine.scheduler.seated)])
    assert texts(tickets) == expected and pool.blocks.num_used == 0
    # All tokens would have 15 pages. A pass of 512 has 8, and the window one more.
    assert most <= 9
    assert pool.blocks.hits >= 2 * (length // 64) * 64
    whole, windowed = pages.page_bytes(plan, params, 64)
    leaves = jax.tree.leaves(pool.buffers)
    assert sum(leaf.nbytes for leaf in leaves) == 80 * whole + most_windowed * windowed
    assert (sum(ticket.num_preemptions for ticket in tickets) > 0) == is_scarce


def test_a_prefix_is_shared_if_every_kind_of_layers_has_the_pages_that_it_needs():
    kinds = [BlockKind(20, 2), BlockKind(8, 2, window=4)]
    pool = BlockPool(kinds, lookahead=1)
    table, text = BlockTable(pool), np.arange(20, dtype=np.int32)
    table.allocate(text[:2])
    for length in range(2, 13, 2):  # as a prefill in passes of two tokens
        assert table.grow(length)
        table.advance(text[: length + 1], length)
    assert [sum(map(bool, held)) for held in table.pages] == [6, 2]
    table.free()
    assert BlockTable(pool).num_cached_pages(text) == 6
    kinds[1].evict(kinds[1].cached(table.digests[:6])[-1:])
    assert BlockTable(pool).num_cached_pages(text) == 5
    kinds[1].clear_cache()
    assert BlockTable(pool).num_cached_pages(text) == 0  # though the other kind has all pages
