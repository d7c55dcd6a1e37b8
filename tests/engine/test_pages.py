"""Pages: sequences share, grow, lose and resume them, and their texts stay what they are."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from jspec.core import kv_cache, paging
from jspec.core.entries import AttentionKV, dtype_of
from jspec.core.logprobs import Scoring
from jspec.core.types import Params
from jspec.engine import chunks, memory, pages, slots
from jspec.engine import functional as host
from jspec.engine.block_kind import BlockKind
from jspec.engine.block_pool import BlockPool
from jspec.engine.block_table import BlockTable
from jspec.engine.chunks import Chunk
from jspec.engine.engine import Engine
from jspec.engine.loop import prefill
from jspec.engine.pages import Pool
from jspec.engine.plan import Plan
from jspec.grammar import automata
from tests import fakes, tiny
from tests.aot import figures
from tests.api.test_many_calls import resident
from tests.plain_processors import Spelling
from tests.test_conformance import DRAFTERS

AMPLE, SCARCE = 100, 18  # pages
STEM = np.random.default_rng(0).integers(1, tiny.VOCAB, 40).tolist()


def sequences(**options):
    """Return sequences that share beginnings, one of a single token, greedy and sampled in turn."""
    rows = []
    shapes = ((20, 3, 12), (33, 1, 9), (0, 1, 14), (33, 7, 12), (40, 0, 10), (17, 9, 13))
    for index, (shared, own, count) in enumerate(shapes):
        rest = np.random.default_rng(index).integers(1, tiny.VOCAB, own).tolist()
        given = options | dict(max_tokens=count, temperature=0.9 * (index % 2), stream=index)
        rows.append(host.SequenceParams((*STEM[:shared], *rest), **given))
    return rows


def paged(plan, params, num_pages, page_size=4, **options):
    """Return an engine of three slots over pages."""
    pool = Pool(plan, params, num_pages=num_pages, page_size=page_size, **options)
    return Engine(plan, params, num_slots=3, capacity=64, shared=(), pool=pool)


def run(engine, rows, **options):
    """Run rows; check that all pages come back. Return the tickets."""
    tickets = [engine.submit(row, **options) for row in rows]
    while not engine.is_idle:
        engine.step()
    engine.settle()
    assert engine.pool.blocks.num_used == 0
    assert not any(kind.ref_counts.any() for kind in engine.pool.blocks.kinds)
    return tickets


def texts(tickets):
    return [ticket.answer.tokens.tolist() for ticket in tickets]


def steps(tickets):
    """Return how many tokens each round drafted and accepted: what the drafter's cache decides."""
    return [np.array(ticket.answer.steps).tolist() for ticket in tickets]


def check(method, tree):
    """Compare a method over pages, cold and warm, preempted and not, with contiguous caches."""
    drafter, weights = DRAFTERS[method][tree]
    rule = "rejection" if method == "hybrid" and tree == "merged" else "coupled"
    plan = Plan(tiny.TARGET, drafter, rule, node_buckets=(drafter.tree_size,))
    params, rows = Params(tiny.params().target, weights()), sequences()
    same = plan.effective_rule.randomness == "target"
    if not same:
        rows = [dataclasses.replace(row, temperature=0.0) for row in rows]
    contiguous = Engine(plan, params, num_slots=3, capacity=64, shared=())
    expected = [contiguous.submit(row) for row in rows]
    while not contiguous.is_idle:
        contiguous.step()
    for size, count in ((4, AMPLE), (16, 60)):
        engine = paged(plan, params, count, size)
        for is_warm in (False, True):
            before = engine.pool.blocks.hits
            tickets = run(engine, rows)
            assert texts(tickets) == texts(expected)
            assert steps(tickets) == steps(expected)
            if is_warm:
                assert (engine.pool.blocks.hits > before) == (drafter.lookahead is not None)
    scarce = run(paged(plan, params, SCARCE), rows, rounds=2)
    assert sum(ticket.num_preemptions for ticket in scarce) > 0
    assert texts(scarce) == texts(expected)


CASES = [(method, tree) for method, trees in DRAFTERS.items() for tree in trees]
CHOSEN = [("none", "greedy chain"), ("draft_model", "chain"), ("eagle3", "paths")]


@pytest.mark.parametrize("case", CHOSEN, ids="-".join)
def test_texts_over_pages_are_those_over_contiguous_caches(case):
    check(*case)


@pytest.mark.slow
@pytest.mark.parametrize("case", sorted(set(CASES) - set(CHOSEN)), ids="-".join)
def test_texts_over_pages_are_those_over_contiguous_caches_with_every_other_method(case):
    check(*case)


def test_a_drafter_or_target_that_reads_no_pages_is_named():
    foreign = Plan(tiny.TARGET, fakes.OnePassDrafter(3, tiny.VOCAB))
    with pytest.raises(ValueError, match="OnePassDrafter reads no KV cache with pages; run it wit"):
        Pool(foreign, tiny.params(), num_pages=8)
    toy = Plan(fakes.PrefixTarget(8), tiny.NONE)
    with pytest.raises(ValueError, match="PrefixTarget reads no KV cache with pages"):
        Pool(toy, Params(None), num_pages=8)


# ------------------------------------------------------------------------------ mistakes of peers


def test_a_row_of_a_head_is_not_shared_with_a_text_whose_next_token_differs():
    """The last entry of a page holds the token after it, which another text may not have.

    The tokens of the page alone are not enough: the first text to fill the page would supply its
    last entry for all others.
    """
    same = [7] * 8

    def digests(text, ahead):
        added = []
        BlockPool([BlockKind(2, 4)], lookahead=ahead).add_digests(added, np.array(text), "")
        return added

    assert digests([*same, 1], 0) == digests([*same, 2], 0)
    first, second = digests([*same, 1], 1), digests([*same, 2], 1)
    assert first[0] == second[0] and first[1] != second[1]
    assert len(digests(same, 1)) == 1  # the token after the second page is not drawn yet


def test_two_texts_that_part_at_the_end_of_a_page_draft_as_if_they_were_alone():
    drafter, weights = DRAFTERS["eagle3"]["paths"]
    plan, params = Plan(tiny.TARGET, drafter, "coupled"), Params(tiny.params().target, weights())
    rows = [
        host.SequenceParams((*STEM[:8], token, *STEM[9:20]), max_tokens=12)
        for token in (3, 5, 3, 5)
    ]
    engine = paged(plan, params, AMPLE)
    one_by_one = [run(engine, [row])[0] for row in rows]  # the third and fourth are warm
    assert engine.pool.blocks.hits >= 2 * 16
    for ticket, row in zip(one_by_one, rows, strict=True):
        cold = run(paged(plan, params, AMPLE), [row])[0]
        assert texts([ticket]) == texts([cold]) and steps([ticket]) == steps([cold])


def test_pages_of_a_text_that_the_host_ends_are_taken_again_at_once():
    """The launch in flight still writes to them; what comes after it must not see that."""
    plan, params = Plan(tiny.TARGET, tiny.DRAFT, "coupled"), tiny.params()
    rows = [dataclasses.replace(row, max_tokens=20) for row in sequences()] * 2
    expected = texts(run(paged(plan, params, AMPLE, enable_prefix_caching=False), rows))
    for is_shared in (True, False):
        engine = paged(plan, params, SCARCE, enable_prefix_caching=is_shared)
        tickets = [
            engine.submit(
                row,
                rounds=1,
                listener=(lambda answer: len(answer.tokens) > 3) if index % 2 else None,
            )
            for index, row in enumerate(rows)
        ]
        while not engine.is_idle:
            engine.step()
        for ticket, text in zip(tickets, expected, strict=True):
            assert ticket.answer.tokens.tolist() == text[: len(ticket.answer.tokens)]
        assert texts(tickets[::2]) == expected[::2]


# ------------------------------------------------------------------------------------ the engine


def test_a_preempted_sequence_keeps_its_grammar_its_scores_and_its_penalties():
    tokenizer, end = Spelling(("", "a", "b", "ab", "ba", "aa", "1", "2", "12", ":", "x")), 0
    grammar = automata.compiled(r"[12](:x){7}(ab|ba){5}", tokenizer, frozenset({end}), 64)
    rows = [
        host.SequenceParams((3, 9), max_tokens=30, stop_token_ids=(end,), grammar=grammar),
        host.SequenceParams((4, 5, 6), max_tokens=30, presence_penalty=1.5, min_tokens=20),
        host.SequenceParams((7,) * 9, max_tokens=30, temperature=0.8, frequency_penalty=1.0),
    ]
    plan, params, scoring = Plan(tiny.TARGET, tiny.NGRAM), tiny.params(), Scoring(2, prompt=True)
    ample = run(paged(plan, params, AMPLE), rows, scoring=scoring)
    scarce = run(paged(plan, params, SCARCE), rows, scoring=scoring, rounds=2)
    assert sum(ticket.num_preemptions for ticket in scarce) > 1
    assert texts(scarce) == texts(ample)
    for ticket, other in zip(scarce, ample, strict=True):
        for name in ("logprobs", "prompt_logprobs"):
            ours, theirs = getattr(ticket.answer, name), getattr(other.answer, name)
            np.testing.assert_array_equal(ours.top_ids, theirs.top_ids)
            np.testing.assert_allclose(ours.chosen, theirs.chosen, atol=1e-4)


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_sampled_texts_survive_a_preemption_where_a_round_ends(rule):
    plan, params = Plan(tiny.TARGET, tiny.DRAFT, rule), tiny.params()
    rows = [
        host.SequenceParams(tuple(STEM[index : index + 9]), 25, temperature=1.0, stream=index)
        for index in range(8)
    ]
    scarce = run(paged(plan, params, SCARCE), rows, rounds=1)
    assert sum(ticket.num_preemptions for ticket in scarce) > 3
    assert texts(scarce) == texts(run(paged(plan, params, AMPLE), rows))


def test_the_youngest_of_the_lowest_priority_is_preempted():
    plan, params = Plan(tiny.TARGET, tiny.NONE), tiny.params()
    engine = paged(plan, params, SCARCE)
    row = host.SequenceParams(tuple(STEM[:10]), max_tokens=30)
    late, urgent, middle = (engine.submit(row, priority=rank, rounds=2) for rank in (2, 0, 1))
    while not engine.is_idle:
        engine.step()
    assert late.num_preemptions >= middle.num_preemptions and urgent.num_preemptions == 0
    assert late.num_preemptions > 0


@pytest.mark.parametrize("name", ["none", "eagle3"])
def test_sequences_that_arrive_together_read_their_prefix_once(name):
    drafter, weights = DRAFTERS["eagle3"]["paths"]
    plan = Plan(tiny.TARGET, tiny.NONE if name == "none" else drafter, "coupled")
    params = Params(tiny.params().target, None if name == "none" else weights())
    row = host.SequenceParams(tuple(STEM), max_tokens=6, temperature=0.8)
    rows = [dataclasses.replace(row, stream=stream) for stream in range(3)]  # n = 3
    rows += [dataclasses.replace(row, prompt=(*STEM[:22], *STEM[:9]))]  # shares five pages
    engine, others = paged(plan, params, AMPLE), paged(plan, params, AMPLE)
    tickets = run(engine, rows)
    others.pool.blocks.shares_prefixes = False
    assert texts(tickets) == texts(run(others, rows))
    # 39 tokens once; then what full pages do not hold, or the last one for EAGLE.
    assert engine.num_prefilled == 39 + 2 * 3 + 10
    assert [ticket.answer.num_cached_tokens for ticket in tickets] == [0, 36, 36, 20]


def test_prompts_that_are_scored_are_read_anew():
    plan, params = Plan(tiny.TARGET, tiny.NONE), tiny.params()
    engine, row = paged(plan, params, AMPLE), host.SequenceParams(tuple(STEM), max_tokens=4)
    run(engine, [row])
    assert engine.pool.blocks.hits == 0
    (cold,) = run(engine, [row], scoring=Scoring(1, prompt=True))
    assert engine.pool.blocks.hits == 0 and len(cold.answer.prompt_logprobs.chosen) == len(STEM) - 1
    run(engine, [row])
    assert engine.pool.blocks.hits == 36  # 39 tokens are prefilled, at least one of them anew


def test_salts_keep_the_pages_of_tenants_apart():
    plan, params = Plan(tiny.TARGET, tiny.NONE), tiny.params()
    engine, row = paged(plan, params, AMPLE), host.SequenceParams(tuple(STEM), max_tokens=4)
    for salt, hits in (("a", 0), ("b", 0), ("a", 36), ("", 36), ("b", 72)):
        run(engine, [row], cache_salt=salt)
        assert engine.pool.blocks.hits == hits


def test_a_sequence_that_no_cache_can_hold_is_refused_at_once():
    plan, params = Plan(tiny.TARGET, tiny.NONE), tiny.params()
    engine = paged(plan, params, 6)
    with pytest.raises(ValueError, match="24 tokens together, which need 6 pages of 4, but the KV"):
        engine.submit(host.SequenceParams(tuple(STEM[:14]), max_tokens=10))
    assert engine.is_idle


def test_a_pool_grows_as_sequences_need_it_and_not_beyond_its_limit():
    plan, params = Plan(tiny.TARGET, tiny.NONE), tiny.params()
    expected = texts(run(paged(plan, params, AMPLE), sequences()))
    engine = paged(plan, params, 2, most=40)
    assert texts(run(engine, sequences())) == expected
    assert 20 < engine.pool.blocks.kinds[0].num_pages <= 40


def test_a_text_ends_with_an_error_where_memory_runs_out_and_the_engine_stays_usable(monkeypatch):
    plan, params = Plan(tiny.TARGET, tiny.NONE), tiny.params()
    engine = paged(plan, params, 8, most=100)

    def no_memory(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(pages, "_extended", no_memory)
    short = host.SequenceParams(tuple(STEM[:8]), max_tokens=8)
    long = dataclasses.replace(short, max_tokens=40)
    tickets = run(engine, [short, long, short], rounds=2)
    reasons = [ticket.answer.finish_reason for ticket in tickets]
    assert reasons == ["length", "error", "length"]
    assert "the KV cache suffices for 28 tokens" in str(tickets[1].error)
    assert texts(run(engine, [short])) == texts(tickets[:1])


def test_a_listener_that_raises_ends_its_own_text_alone():
    plan, params, rows = Plan(tiny.TARGET, tiny.NONE), tiny.params(), sequences()
    expected = texts(run(paged(plan, params, AMPLE), rows))

    def broken(answer):
        raise KeyError("of a user")

    engine = paged(plan, params, AMPLE)
    tickets = [
        engine.submit(row, rounds=2, listener=broken if index == 1 else None)
        for index, row in enumerate(rows)
    ]
    while not engine.is_idle:
        engine.step()
    assert isinstance(tickets[1].error, KeyError) and tickets[1].answer.finish_reason == "error"
    del tickets[1], expected[1]
    assert texts(tickets) == expected and engine.pool.blocks.num_used == 0


# ------------------------------------------------------------------------------------- the table


def consistent(pool, tables, contents):
    """Check the counts of sequences, and that cached pages hold the text of their digests."""
    for index, (kind, held) in enumerate(zip(pool.kinds, contents, strict=True)):
        lists = [table.pages[index] for table in tables]
        assert kind.window or not any(0 in pages for pages in lists)
        counts = np.bincount([p for pages in lists for p in pages if p], minlength=kind.num_pages)
        np.testing.assert_array_equal(kind.ref_counts, counts)
        assert counts[0] == 0 and kind.num_used == (counts > 0).sum()
        assert kind.num_free + kind.num_used == kind.num_pages - 1
        for digest, page in kind._cached.items():
            assert held[page] == digest and kind._digests[page] == digest


@settings(max_examples=25)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(6, 40),
    st.integers(1, 5),
    st.sampled_from([(None,), (1,), (4,), (None, 4), (None, 7)]),
)
def test_random_sequences_never_lose_share_wrongly_or_leak_a_page(seed, count, size, windows):
    rng = np.random.default_rng(seed)
    counts = [count, int(rng.integers(4, count))]
    kinds = [BlockKind(n, size, window=w) for n, w in zip(counts, windows, strict=False)]
    pool = BlockPool(kinds, lookahead=1)
    running, contents = [], [{} for _ in kinds]
    for _ in range(400):
        act = rng.integers(0, 10)
        if act < 4:  # a sequence comes, with one of few beginnings
            text = rng.integers(0, 2, rng.integers(1, 5 * size)).astype(np.int32)
            table = BlockTable(pool, "ab"[rng.integers(0, 2)])
            num_cached = table.allocate(text, spare=int(rng.integers(0, 2)))
            if num_cached is None:
                assert not table.pages
                continue
            assert num_cached % size == 0 and num_cached <= max(len(text) - 2, 0)
            cached = num_cached // size
            for kind, pages, held in zip(kinds, table.pages, contents, strict=True):
                first = kind.unseen(num_cached)
                assert not any(pages[:first])
                assert [held[page] for page in pages[first:cached]] == table.digests[first:cached]
            running.append([table, text])
        elif running and act < 8:  # one grows
            table, text = running[rng.integers(0, len(running))]
            grown = np.append(text, rng.integers(0, 2, rng.integers(1, 3 * size)).astype(np.int32))
            if table.grow(len(grown)):
                next(pair for pair in running if pair[0] is table)[1] = grown
                filled = [list(pages) for pages in table.pages]
                table.advance(grown, len(grown) - 1)
                for kind, pages, old, held in zip(
                    kinds, table.pages, filled, contents, strict=True
                ):
                    seen = range(max(len(grown) - (kind.window or 10**6), 0), len(grown) - 1)
                    assert all(pages[position // size] for position in seen)
                    assert not kind.window or sum(map(bool, pages)) <= kind.window // size + 2
                    pairs = zip(old, table.digests, strict=False)
                    held |= {a: b for a, b in pairs if kind._digests.get(a) == b}
        elif running:  # one ends, is aborted or preempted
            table, _ = running.pop(rng.integers(0, len(running)))
            table.free()
        consistent(pool, [table for table, _ in running], contents)
    for table, _ in running:
        table.free()
    assert pool.num_used == 0 and pool.num_free == sum(kind.num_pages - 1 for kind in kinds)


def test_the_page_that_was_freed_first_is_evicted_first_and_the_end_of_a_text_before_its_start():
    pool = BlockPool([BlockKind(8, 2)], lookahead=1)
    first, second = BlockTable(pool), BlockTable(pool)
    texts = np.arange(7, dtype=np.int32), np.arange(10, 17, dtype=np.int32)
    for table, text in zip((first, second), texts, strict=True):
        assert table.allocate(text[:6]) == 0 and table.grow(6)
        table.advance(text, 6)

    def num_cached(text):
        digests = []
        pool.add_digests(digests, text, "")
        return pool.num_cached(digests)

    first.free()
    second.free()
    assert [num_cached(text) for text in texts] == [3, 3]
    BlockTable(pool).allocate(np.full(6, 50, np.int32))  # one page was never used, two are evicted
    assert [num_cached(text) for text in texts] == [1, 3]
    again = BlockTable(pool)
    assert again.allocate(texts[0]) == 2  # shares its page, so others are evicted before it
    assert [num_cached(text) for text in texts] == [1, 0]


@pytest.mark.slow
def test_nothing_leaks_after_ten_thousand_random_requests():
    plan, params = Plan(tiny.TARGET, tiny.NGRAM), tiny.params()
    engine, rng, live = paged(plan, params, 24), np.random.default_rng(0), []
    preempted = 0
    for number in range(10_000):
        shared, own = int(rng.integers(0, 30)), int(rng.integers(1, 8))
        prompt = (*STEM[:shared], *rng.integers(1, tiny.VOCAB, own).tolist())
        row = host.SequenceParams(prompt, max_tokens=int(rng.integers(1, 20)), stream=number)
        live.append(engine.submit(row, rounds=int(rng.integers(1, 9)), priority=number % 3))
        while len(live) > 12:
            engine.step()
            preempted += sum(ticket.num_preemptions for ticket in live if ticket.finished)
            live = [ticket for ticket in live if not ticket.finished]
        if rng.random() < 0.1:
            engine.abort(live.pop(int(rng.integers(0, len(live)))))
    while not engine.is_idle:
        engine.step()
    engine.settle()
    assert preempted > 100 and engine.pool.blocks.hits > 10_000
    assert engine.pool.blocks.num_used == 0 and engine.pool.blocks.num_free == 23


# ------------------------------------------------------------------------------------- the cache


@pytest.mark.parametrize("stored", [jnp.float32, jnp.bfloat16, jnp.uint16])
def test_a_cache_of_pages_holds_what_a_contiguous_one_holds(stored):
    rng = np.random.default_rng(0)
    heads, dim, page, batch = 2, 4, 4, 3
    dtype = dtype_of(jnp.zeros(0, stored))
    layers = [AttentionKV.empty(batch, heads, 24, dim, dtype) for _ in range(2)]
    plain = kv_cache.empty(batch, layers)
    pools = paging.allocate_pool(plain, (20,), page, in_bits=stored == jnp.uint16)
    table = rng.permutation(np.arange(1, 19)).reshape(batch, 6).astype(np.int32)
    cache = kv_cache.KVCache(pools, jnp.zeros(batch, jnp.int32), (table,))
    for _ in range(4):
        new = lambda: jnp.asarray(rng.normal(size=(batch, heads, 6, dim)), dtype)
        fresh = tuple(AttentionKV(new(), new()) for _ in range(2))
        rows = jnp.asarray(rng.integers(0, 6, (batch, 5)), jnp.int32)
        count = jnp.asarray(rng.integers(0, 6, batch), jnp.int32)
        plain = kv_cache.append(plain, fresh, rows, count)
        cache = kv_cache.append(cache, fresh, rows, count)
    np.testing.assert_array_equal(cache.length, plain.length)
    for pool, buffer in zip(
        jax.tree.leaves(cache.layers), jax.tree.leaves(plain.layers), strict=True
    ):
        held = jnp.moveaxis(lax.bitcast_convert_type(pool, dtype)[table], 1, 2).reshape(
            batch, heads, -1, dim
        )
        for row, length in enumerate(plain.length):
            np.testing.assert_array_equal(held[row, :, :length], buffer[row, :, :length])
    assert not jax.tree.leaves(cache.layers)[0][0].any()  # the null page


@pytest.mark.parametrize("size", [Chunk(1, 32), Chunk(2, 16)])
@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
def test_a_prefill_writes_its_pages_without_copying_the_pool(dtype, size):
    plan, params = Plan(tiny.TARGET, tiny.DRAFT), tiny.params()
    pool = Pool(plan, params, num_pages=23, page_size=16, dtype=dtype)
    tables = (jnp.arange(1, 13).reshape(3, 4),)
    state = slots.allocate(plan, params, 3, 64, has_pages=True)
    arrays = chunks.assemble([STEM[:33]] * size.rows, [0] * size.rows, size)
    rows = np.arange(size.rows, dtype=np.int32)
    given = pool.lend(state), *arrays, rows, None, tables
    compiled = prefill.lower(plan, params, *given).compile()
    shapes = tuple({leaf.shape for leaf in jax.tree.leaves(pool.buffers)})
    read = figures.read(compiled, shapes)
    assert (read["cache_copies_in_loop"], read["cache_copies_once"]) == (0, 0)


def test_pages_of_bfloat16_take_half_the_memory_and_give_nearly_the_same_texts():
    plan, params, rows = Plan(tiny.TARGET, tiny.DRAFT), tiny.params(), sequences()
    engine = paged(plan, params, AMPLE, dtype=jnp.bfloat16)
    halved, whole = (sum(pages.page_bytes(plan, params, 4, x)) for x in (jnp.bfloat16, None))
    assert (
        whole
        == 2 * halved
        == sum(leaf[0].nbytes for leaf in jax.tree.leaves(engine.pool.buffers)) * 2
    )
    answers = texts(run(engine, rows))
    expected = texts(run(paged(plan, params, AMPLE), rows))
    assert np.mean([x == y for x, y in zip(answers, expected, strict=True)]) >= 0.5
    assert texts(run(engine, rows)) == answers  # from cached prefixes


def test_the_memory_of_a_cache_is_given_in_pages_bytes_or_a_share():
    plan, params = Plan(tiny.TARGET, tiny.DRAFT), tiny.params()
    (each,) = pages.page_bytes(plan, params, 16)
    sizes = dict(num_tokens=64, num_seqs=1, block_size=16)
    of = functools.partial(memory.pool_of, plan, params, **sizes)
    pages_of = lambda **given: of(**given).blocks.kinds[0]
    assert pages_of(num_gpu_blocks_override=7).num_pages == 8
    assert pages_of(kv_cache_memory_bytes=9 * each + 5).num_pages == 9
    assert pages_of().num_pages == 5 and pages_of().most == 4 * 2**30 // each
    assert pages_of(gpu_memory_utilization=0.5).most > 5
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    halved = memory.pool_of(plan, narrow, kv_cache_memory_bytes=9 * each, **sizes)
    assert halved.blocks.kinds[0].num_pages == 18
    with pytest.raises(
        ValueError, match=f"leaves 10 bytes, but one page of 16 tokens takes {each:,}"
    ):
        of(kv_cache_memory_bytes=10)


def test_pages_of_all_caches_have_one_size_whatever_a_drafter_adds_to_its_buffers():
    plan = Plan(tiny.TARGET, tiny.DRAFT.with_backlog(16))
    pool = Pool(plan, tiny.params(), num_pages=2, page_size=16)
    assert {leaf.shape[2] for leaf in jax.tree.leaves(pool.buffers)} == {16}


def test_a_fixed_pool_holds_no_memory_before_it_is_used():
    pool = Pool(Plan(tiny.TARGET, tiny.NONE), tiny.params(), num_pages=2, page_size=16)
    pool.blocks.kinds[0].most = 100_000
    before = resident()
    pool.fix(100_000)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(pool.buffers))
    assert size > 100e6 and resident() - before < size / 4
    assert not any(leaf.any() for leaf in jax.tree.leaves(pool.buffers))
