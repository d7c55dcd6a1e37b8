"""Log-probabilities of texts and prompts equal those of one full pass over the text."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

import jspec
from jspec import SamplingParams
from jspec.api import requests
from jspec.api.prompts import Prompt
from jspec.core.logprobs import Scoring, score
from jspec.drafters.ngram import NGram
from tests import llm_fixtures

PROMPTS = ["the quick brown", "def add(x, y):", "grüße", "the the the the"]
ASKED = [
    SamplingParams(
        temperature=t, max_tokens=20, seed=5, ignore_eos=True, logprobs=k, prompt_logprobs=p
    )
    for t, k, p in ((0.0, 3, None), (0.7, 0, 2), (1.0, None, 0), (0.9, 5, 1))
]


def full_pass(root, ids):
    """Logits of a text in one pass, without cache, draft or loop."""
    return np.asarray(llm_fixtures.loaded(root)["target"].logits([ids])[0], np.float64)


def check(listed, logits, token, count):
    """Compare one position with the logits before it."""
    distribution = scipy.special.log_softmax(logits)
    assert next(iter(listed)) == token
    assert listed[token].rank == 1 + np.count_nonzero(distribution > distribution[token])
    for each, actual in listed.items():
        np.testing.assert_allclose(actual.logprob, distribution[each], atol=2e-5)
    likeliest = set(np.argsort(-distribution)[:count].tolist())
    assert set(listed) == likeliest | {token}


@pytest.mark.parametrize("method", ["none", "ngram", "draft_model"])
def test_scores_equal_those_of_one_pass_over_the_whole_text(root, method):
    llm = llm_fixtures.llm(root, method)
    for params, output in zip(ASKED, llm.generate(PROMPTS, ASKED), strict=True):
        prompt, answer = output.prompt_token_ids, output.outputs[0]
        logits = full_pass(root, prompt + answer.token_ids)
        if params.logprobs is None:
            assert answer.logprobs is None and answer.cumulative_logprob is None
        else:
            before = logits[len(prompt) - 1 : -1]
            for listed, row, token in zip(answer.logprobs, before, answer.token_ids, strict=True):
                check(listed, row, token, params.logprobs)
            total = sum(
                listed[token].logprob
                for listed, token in zip(answer.logprobs, answer.token_ids, strict=True)
            )
            assert answer.cumulative_logprob == pytest.approx(total, abs=1e-4)
        if params.prompt_logprobs is None:
            assert output.prompt_logprobs is None
        else:
            first, *rest = output.prompt_logprobs
            assert first is None and len(rest) == len(prompt) - 1
            for listed, row, token in zip(rest, logits, prompt[1:], strict=False):
                check(listed, row, token, params.prompt_logprobs)


def test_tokens_are_spelled_and_texts_stay_as_they_are(root):
    llm = llm_fixtures.llm(root, "draft_model")
    bare = [dataclasses.replace(p, logprobs=None, prompt_logprobs=None) for p in ASKED]
    scored, plain = llm.generate(PROMPTS, ASKED), llm.generate(PROMPTS, bare)
    for one, other in zip(scored, plain, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
    decode = llm.get_tokenizer().decode
    for token, actual in scored[0].outputs[0].logprobs[0].items():
        assert actual.decoded_token == decode([token])


def test_a_text_cut_at_a_stop_string_has_one_entry_per_token(root):
    llm = llm_fixtures.llm(root, "draft_model")
    whole = llm.generate(PROMPTS[:1], ASKED[0])[0].outputs[0]
    pairs = (whole.text[at : at + 2] for at in range(6, len(whole.text)))
    stop = next(pair for pair in pairs if "\ufffd" not in pair)
    cut = llm.generate(PROMPTS[:1], dataclasses.replace(ASKED[0], stop=stop))[0].outputs[0]
    assert len(cut.logprobs) == len(cut.token_ids) < len(whole.token_ids)
    assert [*cut.logprobs[-1]] == [*whole.logprobs[len(cut.token_ids) - 1]]


def test_a_stream_lists_and_spells_each_token_once(root, monkeypatch):
    llm = llm_fixtures.llm(root, "draft_model")
    asked = dataclasses.replace(ASKED[0], prompt_logprobs=1)
    tokenizer, spelled = llm.get_tokenizer(), []
    decode = tokenizer.decode

    def watched(ids, **settings):
        spelled.extend([] if settings else ids)  # texts are made with settings
        return decode(ids, **settings)

    monkeypatch.setattr(tokenizer, "decode", watched)
    *_, last_but_one, last = llm.stream(PROMPTS[0], asked, rounds=1)
    assert len(spelled) == len(set(spelled))
    before, after = last_but_one.outputs[0].logprobs, last.outputs[0].logprobs
    assert len(before) < len(after)
    assert all(old is new for old, new in zip(before, after, strict=False))
    after.clear()  # a reader may change the lists
    assert len(before) == len(last_but_one.outputs[0].token_ids)
    assert llm.generate(PROMPTS[0], asked)[0].prompt_logprobs == last.prompt_logprobs


@pytest.mark.parametrize("mode", ["raw_logits", "processed_logits", "processed_logprobs"])
def test_modes_score_before_and_after_processors_and_filters(root, mode):
    target = llm_fixtures.loaded(root)["target"]
    llm = jspec.LLM(target, logprobs_mode=mode, max_logprobs=-1)
    params = SamplingParams(
        temperature=0.5, top_k=7, logit_bias={9: 2.0}, max_tokens=6, seed=1, logprobs=-1
    )
    output = llm.generate(PROMPTS[0], params)[0]
    answer = output.outputs[0]
    logits = full_pass(root, output.prompt_token_ids + answer.token_ids)
    rows = logits[len(output.prompt_token_ids) - 1 : -1]
    for listed, row in zip(answer.logprobs, rows, strict=True):
        actual = np.array([listed[token].logprob for token in range(row.size)])
        if mode == "raw_logits":
            np.testing.assert_allclose(actual, row, atol=1e-4)
            continue
        row = row.copy()
        row[9] += 2.0
        row /= 0.5
        row[row < np.sort(row)[-7]] = -np.inf
        if mode == "processed_logprobs":
            row = scipy.special.log_softmax(row)
        np.testing.assert_allclose(actual, row, atol=1e-4)


def test_counts_within_a_power_of_two_compile_nothing(root, monkeypatch):
    llm, traced = llm_fixtures.llm(root, "ngram"), []
    asked = dataclasses.replace(ASKED[0], logprobs=8, prompt_logprobs=8)
    most = llm.generate(PROMPTS[0], asked)[0]
    for name in ("init", "prefill", "propose"):
        known = getattr(NGram, name)
        monkeypatch.setattr(
            NGram, name, lambda *given, known=known: traced.append(1) or known(*given)
        )
    for count, others in ((5, 0), (0, 7), (6, 1)):
        some = dataclasses.replace(asked, logprobs=count, prompt_logprobs=others)
        fewer = llm.generate(PROMPTS[0], some)[0]
        check_fewer(fewer.outputs[0].logprobs, most.outputs[0].logprobs, count)
        check_fewer(fewer.prompt_logprobs[1:], most.prompt_logprobs[1:], others)
    assert not traced


def check_fewer(fewer, more, count):
    """Keep the token itself and the first ``count`` of the likeliest."""
    for one, all_of_them in zip(fewer, more, strict=True):
        (token, *_), actual = all_of_them, all_of_them.items()
        assert one == {each: at for each, at in actual if each == token or at.rank <= count}


@pytest.mark.parametrize(
    ("asked", "most", "counted"),
    [
        (0, 20, 8),
        (8, 20, 8),
        (9, 20, 20),
        (17, 320, 32),
        (33, 320, 128),
        (3, 4, 4),
        (-1, 320, 320),
        (300, 1000, 320),
    ],
)
def test_counts_are_eight_times_powers_of_four_up_to_the_limit(asked, most, counted):
    prompt, params = Prompt((1, 2)), SamplingParams(prompt_logprobs=asked, detokenize=False)
    known = dict(eos=frozenset(), tokenizer=None)
    settings = requests.settings_of(prompt, params, room=9, vocab_size=320, **known)
    request = requests.numbered(0, prompt, params, settings, seed=0, **known)
    assert requests.scoring_of([request], 320, most, "raw_logits") == Scoring(
        counted, True, "raw_logits"
    )


def test_the_best_texts_have_the_largest_sums(root):
    llm = llm_fixtures.llm(root, "draft_model")
    params = SamplingParams(n=5, temperature=1.0, seed=3, max_tokens=8, logprobs=0)
    drawn = llm.generate(PROMPTS[0], params)[0].outputs
    best = llm.generate(PROMPTS[0], dataclasses.replace(params, n=2, best_of=5))[0].outputs
    ranked = sorted(drawn, key=lambda each: -each.cumulative_logprob)
    assert [each.token_ids for each in best] == [each.token_ids for each in ranked[:2]]
    assert [each.index for each in best] == [0, 1]
    with pytest.raises(ValueError, match="best_of=5 cannot be streamed"):
        llm.stream(PROMPTS[0], dataclasses.replace(params, n=2, best_of=5))
    logits = jspec.LLM(llm_fixtures.loaded(root)["target"], logprobs_mode="raw_logits")
    with pytest.raises(ValueError, match="best_of=2 compares log-probabilities"):
        logits.generate(PROMPTS[0], SamplingParams(best_of=2))


def test_the_best_texts_are_whole(root):
    """A text that breaks off early has a larger sum."""

    def nothing_after_a_low_token(logits, ids, length):
        return jnp.where((ids[length - 1] < 160) & (length > 12), -jnp.inf, logits)

    llm = llm_fixtures.llm(root, "none")
    params = SamplingParams(
        n=2,
        best_of=16,
        max_tokens=6,
        seed=1,
        ignore_eos=True,
        logprobs=0,
        logits_processors=(nothing_after_a_low_token,),
    )
    drawn = llm.generate(PROMPTS[0], dataclasses.replace(params, n=16))[0].outputs
    whole = sorted(each.cumulative_logprob for each in drawn if each.finish_reason == "length")
    broken = [each.cumulative_logprob for each in drawn if each.finish_reason == "error"]
    best = llm.generate(PROMPTS[0], params)[0].outputs
    assert len(whole) >= 2 and max(broken) > whole[-1]
    assert [each.cumulative_logprob for each in best] == pytest.approx(whole[:-3:-1])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_broken_logit_leaves_the_scores_of_the_sampled_distribution(bad):
    logits = np.random.default_rng(0).normal(size=(1, 1, 8)).astype(np.float32)
    logits[..., 3] = bad
    tokens = jnp.array([[3 if bad == np.inf else 5]])
    actual = score(jnp.asarray(logits), tokens, 2, "raw_logprobs")
    distribution = scipy.special.log_softmax(np.delete(logits[0, 0], 3).astype(np.float64))
    expected = 0.0 if bad == np.inf else distribution[4]
    assert actual.chosen[0, 0] == pytest.approx(expected, abs=1e-5)
    assert actual.rank[0, 0] == 1 + (0 if bad == np.inf else (distribution > distribution[4]).sum())
    assert (actual.top_ids[0, 0, 0] == 3) == (bad == np.inf)


def test_more_than_allowed_and_unknown_modes_are_refused(root):
    target = llm_fixtures.loaded(root)["target"]
    with pytest.raises(ValueError, match="Requested logprobs of 21, which is greater than max"):
        jspec.LLM(target).generate(PROMPTS[0], SamplingParams(logprobs=21))
    with pytest.raises(ValueError, match="Requested prompt_logprobs of -1"):
        jspec.LLM(target).generate(PROMPTS[0], SamplingParams(prompt_logprobs=-1))
    with pytest.raises(ValueError, match="logprobs_mode='raw' must be one of 'raw_logprobs'"):
        jspec.LLM(target, logprobs_mode="raw")
    with pytest.raises(ValueError, match="count=-1 must be a whole number, 0 or more"):
        Scoring(-1)
