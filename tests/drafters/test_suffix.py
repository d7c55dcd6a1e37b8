import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec.api import config
from jspec.api.outputs import Transcript
from jspec.core.types import History
from jspec.drafters import Suffix
from jspec.engine import functional as host
from jspec.engine import loop
from jspec.engine.loop import init_shared
from jspec.engine.plan import Plan
from tests import llm_fixtures, shipped, tiny
from tests.drafters import corpora, suffix_oracle
from tests.fakes import whole

CAPACITY, ROWS, LONGEST = 64, 32, 40


def suffix(**settings):
    """Return a small drafter that counts all occurrences."""
    short = dict(max_cached_requests=6, max_cached_tokens=96, max_occurrences=128)
    named = {f"suffix_decoding_{name}": value for name, value in short.items()}
    return Suffix(**named | settings)


def named(**settings):
    return {f"suffix_decoding_{name}": value for name, value in settings.items()}


def history_of(rows):
    rows = [list(row) for row in rows] + [[0]] * (ROWS - len(rows))
    padded = [row + [9] * (CAPACITY - len(row)) for row in rows]
    return History(jnp.array(padded, jnp.int32), jnp.array([len(row) for row in rows], jnp.int32))


class Limits(NamedTuple):
    """The fields of a request that ``init`` reads."""

    max_length: Any


# Without optimisation by LLVM it runs for longer than it compiles.
@functools.partial(
    jax.jit, static_argnums=0, compiler_options={"xla_backend_optimization_level": 1}
)
def _propose(drafter, shared, history, start):
    memory = drafter.init(None, Limits(history.length), CAPACITY).replace(start=start)
    return drafter.propose(None, None, shared, memory, history)[0]


def proposals(drafter, shared, rows, starts=None):
    """Return (tokens, parents) of the drafted nodes of rows whose responses begin at ``starts``."""
    starts = [len(row) for row in rows] if starts is None else starts
    start = jnp.array([*starts, *[1] * (ROWS - len(rows))], jnp.int32)
    draft = jax.device_get(_propose(drafter, shared, history_of(rows), start))
    parents = np.broadcast_to(draft.parents, draft.tokens.shape)
    assert (draft.tokens[:, 1:][~draft.valid[:, 1:]] == 0).all() and draft.valid[:, 0].all()
    drafted = lambda x, i: x[i, 1:][draft.valid[i, 1:]].tolist()
    return [(drafted(draft.tokens, i), drafted(parents, i)) for i in range(len(rows))]


def expected(drafter, stored, rows, starts):
    return [
        suffix_oracle.proposed(row, start, stored, drafter)
        for row, start in zip(rows, starts, strict=True)
    ]


def texts(rng, count, longest):
    """Return random texts over few tokens, with repeated phrases."""
    size = rng.integers(2, 5)
    phrases = [rng.integers(0, size, rng.integers(2, 9)).tolist() for _ in range(3)]
    drawn = []
    for _ in range(count):
        text = []
        while len(text) < rng.integers(1, longest):
            again = phrases[rng.integers(3)] if rng.random() < 0.7 else [int(rng.integers(size))]
            text += again
        drawn.append(text[: longest - 1])
    return drawn


SETTINGS = {
    "chain": named(max_tree_depth=8),
    "long chain": dict(num_speculative_tokens=6, **named(max_spec_factor=2.5, min_token_prob=0.3)),
    "half": named(max_spec_factor=0.5, min_token_prob=0.0, max_tree_depth=12),
    "tree": dict(tree="best_first", tree_size=10, **named(max_tree_depth=12)),
    "wide tree": dict(
        tree="best_first",
        tree_size=14,
        num_speculative_tokens=3,
        **named(max_spec_factor=4.0, min_token_prob=0.02),
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_drafts_are_those_of_a_suffix_trie(name):
    drafter = suffix(**SETTINGS[name])
    rng = np.random.default_rng(list(SETTINGS).index(name))
    seen = []
    for _ in range(10):
        responses = texts(rng, rng.integers(0, 12), LONGEST)
        corpus = corpora.extend(drafter.init_shared(), responses)
        stored = suffix_oracle.cached(responses, 6, 96)
        assert corpora.responses(corpus) == stored
        rows = [*texts(rng, ROWS - 6, LONGEST), *(text[:5] for text in stored)]
        starts = [int(rng.integers(1, len(row) + 1)) for row in rows]
        drafts = expected(drafter, stored, rows, starts)
        assert proposals(drafter, corpus, rows, starts) == drafts
        seen += drafts
    sizes = {len(tokens) for tokens, _ in seen}
    assert 0 in sizes and len(sizes) > 3  # so the comparison is not empty


def test_positions_are_compared_correctly_after_their_count_wraps_around():
    drafter = suffix(**SETTINGS["chain"])
    rng = np.random.default_rng(9)
    responses, rows = texts(rng, 8, LONGEST), texts(rng, ROWS, LONGEST)
    last = jnp.int32(2**31 - 40)
    corpus = corpora.extend(drafter.init_shared().replace(end=last), responses)
    stored = suffix_oracle.cached(responses, 6, 96)
    assert int(corpus.end) < 0 and corpora.responses(corpus) == stored
    starts = [len(row) for row in rows]
    assert proposals(drafter, corpus, rows) == expected(drafter, stored, rows, starts)


def test_a_response_longer_than_the_corpus_leaves_its_last_tokens():
    text = np.random.default_rng(1).integers(0, 9, 200).tolist()
    corpus = corpora.extend(suffix().init_shared(), [[1, 2, 3], text])
    assert corpora.responses(corpus) == [text[-95:]]
    assert corpora.responses(corpora.extend(corpus, [[4, 5], []])) == [[4, 5]]


def test_as_few_of_the_oldest_responses_as_possible_are_evicted():
    drafter = suffix(**named(max_cached_tokens=12, max_cached_requests=4))
    full = corpora.extend(drafter.init_shared(), [[1, 1, 1], [2, 2, 2], [3, 3, 3]])
    assert corpora.responses(full) == [[1, 1, 1], [2, 2, 2], [3, 3, 3]]
    over = corpora.extend(drafter.init_shared(), [[1, 1, 1], [2, 2, 2], [3, 3, 3, 3]])
    assert corpora.responses(over) == [[2, 2, 2], [3, 3, 3, 3]]  # by one slot
    stored = corpora.responses(corpora.extend(full, [[4], [5], [6]]))
    assert stored == [[3, 3, 3], [4], [5], [6]]


OWN_TEXT = named(max_cached_requests=0, max_tree_depth=4)  # no corpus


def test_the_latest_of_many_occurrences_count():
    row = [1, 2, 1, 2, 1, 2, 1, 3, 4, 1, 3, 1]
    assert proposals(suffix(**OWN_TEXT), (), [row]) == [([2], [0])]
    few = suffix(**OWN_TEXT, **named(max_occurrences=3))  # the end of the text, and "3" twice
    assert proposals(few, (), [row]) == [([3], [0])]


def test_without_a_corpus_only_a_rows_own_text_is_looked_up():
    row = [5, 6, 7, 5, 6]
    drafter = suffix(**OWN_TEXT)
    assert drafter.init_shared() == ()
    assert proposals(drafter, drafter.init_shared(), [row]) == [([7, 5], [0, 1])]


SMALL = Suffix(**named(max_cached_tokens=512, max_tree_depth=8))
BUSHY = Suffix(tree="best_first", tree_size=6, **named(max_cached_tokens=512, max_tree_depth=8))
SOME = [
    host.SequenceParams(prompt, max_tokens=count, temperature=temperature, stream=index)
    for index, (prompt, count, temperature) in enumerate(
        zip(tiny.prompts((1, 9, 23)), (20, 31, 12), (0.0, 0.8, 0.8), strict=True)
    )
]


@functools.cache
def plain():
    return [
        answer.tokens.tolist()
        for answer in host.generate_sequences(Plan(tiny.TARGET, tiny.NONE), tiny.params(), SOME)
    ]


@pytest.mark.parametrize("drafter", [SMALL, BUSHY], ids=["chain", "tree"])
def test_past_responses_speed_up_later_calls_and_change_no_text(drafter):
    plan, shared = whole(tiny.TARGET, drafter), SMALL.init_shared()
    lengths = []
    for _ in range(2):
        answers, shared = host.generate_sharing(plan, tiny.params(), SOME, shared)
        assert [answer.tokens.tolist() for answer in answers] == plain()
        lengths.append(sum(len(a.tokens) for a in answers) / sum(a.rounds for a in answers))
    # Each in the round in which its row ended; the padding row of the batch emitted nothing.
    assert sorted(corpora.responses(shared)) == sorted(plain() * 2)
    assert lengths[1] > 2 > lengths[0]


def test_rows_that_were_cancelled_are_stored_when_they_finish():
    plan = whole(tiny.TARGET, SMALL)
    batch = host.start(plan, tiny.params(), SOME).replace(shared=init_shared(plan))
    batch = host.cancel(plan, host.advance(plan, tiny.params(), batch, 2), [0, 2])
    cut = [answer.tokens.tolist() for answer in batch.answers]
    batch = host.advance(plan, tiny.params(), batch, 1)
    assert sorted(corpora.responses(batch.shared)) == sorted([cut[0], cut[2]])
    batch = host.cancel(plan, batch, [1])
    rest = batch.answers[1].tokens.tolist()
    assert sorted(corpora.responses(batch.shared)) == sorted([cut[0], cut[2], rest])


def test_a_later_call_with_a_fuller_corpus_compiles_nothing(monkeypatch):
    traced, propose = [], Suffix.propose
    monkeypatch.setattr(Suffix, "propose", lambda *a: traced.append(1) or propose(*a))
    shared = SMALL.init_shared()
    for _ in range(2):
        drafter = Suffix(**named(max_cached_tokens=512, max_tree_depth=7))  # no other test has them
        plan = whole(tiny.TARGET, drafter)
        _, shared = host.generate_sharing(plan, tiny.params(), SOME, shared)
    assert len(traced) == 1


def test_the_loop_copies_no_corpus():
    corpus = named(max_cached_tokens=5000, max_cached_requests=77)
    plan = Plan(tiny.TARGET, Suffix(4, **corpus))
    batch = host.start(plan, tiny.params(), SOME)
    arguments = (batch.request, init_shared(plan), batch.state, jnp.int32(9))
    lowered = loop.decode.lower(plan, tiny.params(), *arguments)
    program = shipped.compiled(lowered).as_text()
    for shape in ("8192", "4,8192", "77"):
        assert f"s32[{shape}]" in program
        assert not [x for x in program.split("\n") if f"= s32[{shape}]" in x and " copy(" in x]


PROMPTS = [{"prompt_token_ids": [7, 8, 9]}, {"prompt_token_ids": [5]}]
WHOLE = jspec.SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)


@pytest.fixture(scope="module")
def open_llm(root):
    """Return an ``LLM`` with suffix decoding."""
    target = llm_fixtures.loaded(root)["target"]
    asked = {"method": "suffix"} | named(max_cached_tokens=512, max_tree_depth=8)
    return lambda **more: jspec.LLM(target, asked | more)


def token_ids_of(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def acceptance(outputs):
    return [x.outputs[0].speculative_decoding_stats["mean_acceptance_length"] for x in outputs]


def test_the_corpus_of_an_llm_can_be_saved(open_llm, tmp_path):
    llm, file = open_llm(), tmp_path / "corpus.safetensors"
    first, second = llm.generate(PROMPTS, WHOLE), llm.generate(PROMPTS, WHOLE)
    assert token_ids_of(first) == token_ids_of(second)
    assert min(acceptance(second)) > max(acceptance(first))
    llm.save_shared(file)
    other = open_llm()
    other.load_shared(file)
    assert acceptance(other.generate(PROMPTS, WHOLE)) == acceptance(second)
    with pytest.raises(ValueError, match=r"other settings: index\.far, index\.latest"):
        open_llm(**named(max_cached_tokens=100)).load_shared(file)
    with pytest.raises(ValueError, match="there is nothing to save"):
        open_llm(**named(max_cached_requests=0)).save_shared(file)


def test_an_interrupted_trace_leaves_the_corpus_unchanged(open_llm, monkeypatch):
    llm, other = open_llm(), open_llm()
    assert token_ids_of(llm.generate(PROMPTS, WHOLE)) == token_ids_of(
        other.generate(PROMPTS, WHOLE)
    )

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Transcript, "read", interrupt)  # after the first round
        with pytest.raises(KeyboardInterrupt):
            jspec.trace(llm, PROMPTS[0], WHOLE)
    assert acceptance(llm.generate(PROMPTS, WHOLE)) == acceptance(other.generate(PROMPTS, WHOLE))


def test_after_an_interruption_the_corpus_serves_the_next_call(open_llm, monkeypatch):
    llm = open_llm()

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(jax, "device_get", interrupt)  # a launch has consumed the corpus before it
        llm.generate(PROMPTS, WHOLE)
    expected = token_ids_of(open_llm().generate(PROMPTS, WHOLE))
    assert token_ids_of(llm.generate(PROMPTS, WHOLE)) == expected


def test_two_streams_share_the_corpus_of_the_llm(open_llm):
    llm = open_llm()
    streams = [llm.stream(PROMPTS, WHOLE, rounds=2) for _ in range(2)]
    for a, b in zip(*streams, strict=False):
        assert a.request_id != b.request_id
    assert min(acceptance(llm.generate(PROMPTS, WHOLE))) > 2


def test_the_config_reads_the_keys_of_vllm():
    read = lambda **more: config.read({"method": "suffix"} | more).drafter(None, tiny.TARGET)
    assert read() == Suffix()
    assert read(num_speculative_tokens=6, suffix_decoding_max_spec_factor=2) == Suffix(
        6, suffix_decoding_max_spec_factor=2.0
    )
    assert config.read({"model": "suffix"}).method == "suffix"


def test_a_draft_is_as_deep_as_the_settings_can_make_it():
    sizes = lambda **settings: (Suffix(**settings).max_depth, Suffix(**settings).tree_size)
    assert sizes() == (12, 13)  # a match of 12 and as many tokens behind it are 24
    assert sizes(num_speculative_tokens=5) == (5, 6)
    assert sizes(**named(max_spec_factor=0)) == (0, 1)
    assert sizes(tree="best_first") == (12, 16)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (named(max_tree_depth=0), "suffix_decoding_max_tree_depth=0 must be in"),
        (named(max_cached_requests=-1), "suffix_decoding_max_cached_requests=-1 must be >= 0"),
        (named(max_spec_factor=-0.5), "suffix_decoding_max_spec_factor=-0.5 must be >= 0"),
        (named(min_token_prob=1.5), r"suffix_decoding_min_token_prob=1.5 must be in \[0, 1\]"),
        (named(max_cached_tokens=1), "suffix_decoding_max_cached_tokens=1 must be in"),
        (named(max_occurrences=0), "suffix_decoding_max_occurrences=0 must be in"),
        (dict(num_speculative_tokens=0), "greater than zero"),
        (dict(tree="eagle2"), "tree='eagle2' of suffix must be chain or best_first"),
        (dict(tree_size=5), "longest chain of these settings has 13 nodes"),
        (named(max_tree_depth=2.5), "max_tree_depth=2.5 must be a whole number"),
        (named(min_token_prob="a"), "suffix_decoding_min_token_prob='a' must be a number"),
        (dict(prompt_lookup_max=3), "prompt_lookup_max=3 is not used by method='suffix'"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        config.read({"method": "suffix"} | settings)


def test_short_drafts_have_a_node_bucket():
    assert Plan(tiny.TARGET, Suffix()).node_buckets == (1, 5, 13)
    assert Plan(tiny.TARGET, Suffix(2, suffix_decoding_max_tree_depth=4)).node_buckets == (1, 3)
