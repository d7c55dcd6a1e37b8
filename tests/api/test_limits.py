"""Sizes of requests are checked before any work, by one table."""

import time
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import jspec
from jspec.api.prompts import Encoder
from jspec.util import limits
from tests.server import live

SERVING = Path(__file__).resolve().parents[2] / "docs" / "serving.md"


@pytest.fixture(scope="module")
def llm(root):
    return live.llm(root)


@pytest.mark.parametrize("limit", limits.TABLE, ids=lambda limit: f"{limit.field} {limit.unit}")
def test_the_docs_have_every_limit(limit):
    assert limits.row(limit) in SERVING.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"stop": ["q" * 1_000_000]}, "stop has 1000000 characters in a string, but at most 1000"),
        ({"stop": ["q"] * 100_000}, "stop has 100000 strings, but at most 64 are taken; send"),
        ({"stop_token_ids": [*range(100_000)]}, "stop_token_ids has 100000 ids"),
        ({"bad_words": [f"w{n}" for n in range(2000)]}, "bad_words has 2000 words"),
        ({"bad_words": ["a " * 2000]}, "bad_words has 4000 characters in a word, but at most 200"),
    ],
)
def test_a_size_above_its_limit_is_named_with_its_size(given, words):
    with pytest.raises(ValueError) as error:
        jspec.SamplingParams(**given)
    assert words in str(error.value)


def test_sizes_at_their_limits_are_taken():
    params = jspec.SamplingParams(
        stop=["x" * 1000] * 64, stop_token_ids=[*range(256)] * 2, bad_words=["x" * 200] * 1024
    )
    assert (len(params.stop), len(params.stop_token_ids), len(params.bad_words)) == (64, 256, 1024)


def test_the_tokens_of_a_bad_word_are_bounded(llm):
    with pytest.raises(ValueError, match="bad_words has 201 tokens in a word, but at most 64"):
        llm.generate("x", jspec.SamplingParams(bad_words=["é" * 100]))


def test_a_text_that_cannot_fit_is_refused_by_its_characters(llm):
    with pytest.raises(ValueError, match="prompt has 2000000 characters, but at most 1344 are"):
        llm.generate("a " * 1_000_000)
    with pytest.raises(ValueError, match="prompt has 2000003 characters"):
        llm.chat(
            [{"role": "user", "content": "a " * 1_000_000}],
            chat_template="{{ 'abc' }}{{ messages[0]['content'] }}",
        )


def test_the_longest_text_that_fits_is_taken(llm):
    longest = max(llm.get_tokenizer().get_vocab(), key=len).replace("Ġ", " ")
    text = longest * (llm.max_model_len - 1)
    (request,) = llm.resolver.resolve(text, None, will_run=False)
    assert len(request.prompt.token_ids) == llm.max_model_len - 1


def words(normalizer):
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "é": 1, "abc": 2}, unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.normalizer = pre_tokenizers.Whitespace(), normalizer
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


@pytest.mark.parametrize(
    ("normalizer", "text"),
    [
        (normalizers.NFC(), "e\u0301 " * 10),
        (normalizers.Replace("-", ""), "abc " + "-" * 1000),
        (normalizers.Strip(), "abc" + " " * 1000),
    ],
    ids=["composed", "replaced", "stripped"],
)
def test_characters_are_counted_after_the_normalizer(normalizer, text):
    encode = Encoder(lambda: words(normalizer), max_model_len=4)
    assert encode(text) == words(normalizer).encode(text)
    with pytest.raises(ValueError, match="prompt has 63 characters, but at most 20 are taken"):
        encode("abc " * 15 + "abc" + text[:0])


def test_a_text_that_need_not_fit_may_have_any_length(llm):
    ids = llm.encode_text("a " * 2000, must_fit=False)
    assert ids == llm.get_tokenizer().encode("a " * 2000)


def test_lists_are_read_once_for_all_texts_of_a_prompt(llm):
    words = [f"w{number}" for number in range(1000)]
    params = jspec.SamplingParams(n=2000, temperature=1, bad_words=words)
    begin = time.process_time()
    (request,) = llm.resolver.resolve("x", params, will_run=False)
    assert time.process_time() - begin < 1.5
    assert [each.stream for each in request.sequences] == list(range(2000))
