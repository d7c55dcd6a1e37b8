"""Text from token ids: whole characters only, and the same however the tokens arrive."""

import copy
import itertools
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from jspec.api import detokenizer as text
from jspec.api.outputs import Transcript
from jspec.api.sampling_params import SamplingParams
from jspec.engine.functional import Answer


class Bytes:
    """A tokenizer whose ids are bytes, 256 a special token, and whose first word loses a space."""

    def decode(self, ids, skip_special_tokens, clean_up_tokenization_spaces):
        assert not clean_up_tokenization_spaces
        shown = b"".join(
            b"<s>" * (not skip_special_tokens) if i == 256 else bytes([i]) for i in ids
        )
        return shown.decode("utf-8", errors="replace").removeprefix(" ")


class Words(Bytes):
    """A tokenizer whose ids index a list of byte strings."""

    def __init__(self, *words):
        self.words = words

    def decode(self, ids, **settings):
        return super().decode(b"".join(self.words[i] for i in ids), **settings)


def pieces(ids, prompt=(65,), **settings):
    detokenizer = text.Detokenizer(Bytes(), prompt, **settings)
    return [*(detokenizer.feed(i) for i in ids), detokenizer.flush()]


def test_a_character_comes_when_its_last_byte_does():
    assert pieces("é🙂x".encode()) == ["", "é", "", "", "", "🙂", "x", ""]


def test_a_character_that_is_never_completed_comes_at_the_end():
    assert pieces("ab🙂".encode()[:-1]) == ["a", "b", "", "", "", "\ufffd"]


def test_whole_characters_do_not_wait_for_one_that_the_same_token_begins():
    euro = "€".encode()
    detokenizer = text.Detokenizer(Words(b"A", b"one" + euro[:1], euro[1:] + b"!"), (0,))
    assert [detokenizer.feed(1), detokenizer.feed(2), detokenizer.flush()] == ["one", "€!", ""]


def test_the_space_before_the_first_word_of_an_answer_stays():
    assert "".join(pieces(b" hello")) == " hello"


def test_special_tokens_are_left_out_on_request():
    assert "".join(pieces([97, 256, 98])) == "ab"
    assert "".join(pieces([97, 256, 98], skip_special_tokens=False)) == "a<s>b"


@settings(max_examples=200)
@given(st.lists(st.sampled_from([*"aé🙂".encode(), 32, 10]), max_size=20))
def test_pieces_join_to_the_decoding_of_the_whole(ids):
    assert "".join(pieces(ids)) == bytes(ids).decode("utf-8", errors="replace")


@settings(max_examples=60)
@given(
    st.lists(
        st.one_of(
            st.sampled_from(["🙂", "é", "a "]).map(str.encode),
            st.sampled_from([b"\xff", b"\xf0\x9f", b"\x99", b"\xe2\x82"]).flatmap(
                lambda part: st.integers(1, 90).map(lambda count: part * count)
            ),
        ),
        max_size=6,
    )
)
def test_bytes_that_are_no_text_come_as_decoding_the_whole_gives_them(parts):
    whole = b"".join(parts)
    assert "".join(pieces(whole)) == whole.decode("utf-8", errors="replace")


class Counting(Bytes):
    """Counts the ids that it decodes."""

    def __init__(self):
        self.num_decoded = 0

    def decode(self, ids, **settings):
        self.num_decoded += len(ids)
        return super().decode(ids, **settings)


@pytest.mark.parametrize(
    "unit",
    [b"text ", "🙂é".encode(), b"\xff", b"\xf0\x9f", b"a\xff", [256], [0xF0, 256, 256]],
    ids=["words", "characters", "broken", "half", "mixed", "left out", "half and left out"],
)
def test_a_token_costs_the_same_however_long_the_text_is(unit):
    tokenizer = Counting()
    detokenizer = text.Detokenizer(tokenizer, b"prompt")
    for token in list(unit) * (6000 // len(unit)):
        detokenizer.feed(token)
    detokenizer.flush()
    assert tokenizer.num_decoded < 6000 * 100


def test_special_tokens_that_are_left_out_are_not_decoded(byte_tokens):
    tokenizer = copy.deepcopy(byte_tokens)
    tokenizer.add_special_tokens({"eos_token": "<end>"})
    detokenizer = text.Detokenizer(tokenizer, (1, 2))
    ids = [1, *[tokenizer.eos_token_id] * 3000, 2]
    begin = time.process_time()
    pieces = [detokenizer.feed(token) for token in ids]
    assert "".join(pieces) == " the fox" and time.process_time() - begin < 1
    shown = text.Detokenizer(tokenizer, (1, 2), skip_special_tokens=False)
    assert "".join(map(shown.feed, ids[:3])) == " the<end><end>"


@pytest.fixture(scope="module")
def byte_tokens():
    """A tokenizer like Llama 2's: its decoder drops the first space of its input."""
    words = ["<unk>", "\u2581the", "\u2581fox", "s", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def test_byte_tokens_wait_for_the_end_of_their_run(byte_tokens):
    detokenizer = text.Detokenizer(byte_tokens, (1, 2))
    ids = (1, 2, 3, *(4 + byte for byte in "🙂".encode()), 2)
    pieces = [detokenizer.feed(token) for token in ids]
    assert pieces == [" the", " fox", "s", "", "", "", "", "🙂 fox"]


@settings(max_examples=300)
@given(
    st.lists(st.sampled_from([*"日🙂a".encode(), 0xFF]), max_size=9),
    st.lists(st.one_of(st.integers(-3, -1), st.sampled_from([*"日🙂a".encode()])), max_size=14),
)
def test_pieces_are_what_decoding_all_adds_to_decoding_the_prompt(byte_tokens, prompt, answer):
    prompt = [1, *(4 + byte for byte in prompt)]
    answer = [token + 4 for token in answer]  # 1 to 3 are words
    detokenizer = text.Detokenizer(byte_tokens, prompt)
    pieces = "".join([*(detokenizer.feed(token) for token in answer), detokenizer.flush()])
    whole, before = byte_tokens.decode(prompt + answer), byte_tokens.decode(prompt)
    shared = max(n for n in range(len(before) + 1) if whole.startswith(before[:n]))
    assert pieces == whole[shared:]


@pytest.mark.parametrize("known", [1, 2])
def test_a_character_of_the_prompt_is_completed_by_the_answer(byte_tokens, known):
    first, rest = "日".encode()[:known], "日".encode()[known:]
    detokenizer = text.Detokenizer(byte_tokens, [1, *(4 + byte for byte in first)])
    pieces = [detokenizer.feed(4 + byte) for byte in rest] + [detokenizer.feed(2)]
    assert "".join(pieces) == "日 fox"


def first_stop(whole, stops):
    """The specification: the first end of any stop string, the longest of those that end there."""
    ends = [
        (end, -len(stop), stop)
        for stop in stops
        for end in range(1, len(whole) + 1)
        if whole[:end].endswith(stop)
    ]
    if not ends:
        return None
    end, _, stop = min(ends)
    return end - len(stop), end, stop


def naive_held(whole, stops):
    """The specification: the longest end of the text that begins a stop string."""
    sizes = [n for stop in stops for n in range(1, len(stop)) if whole.endswith(stop[:n])]
    return max(sizes, default=0)


words = st.text("ab", max_size=24)
some_stops = st.lists(st.text("ab", min_size=1, max_size=9), min_size=1, max_size=4)


def cut(data, whole):
    """Cut a text into pieces of any size, the empty one included."""
    sizes = data.draw(st.lists(st.integers(0, 5), max_size=12))
    ends = [0, *itertools.accumulate(sizes), len(whole)]
    return [whole[begin:end] for begin, end in itertools.pairwise(sorted(ends))]


@settings(max_examples=500)
@given(words, some_stops, st.data())
def test_the_first_stop_string_is_found_however_the_text_grows(whole, stops, data):
    watched, known = text.StopStrings(stops), ""
    for piece in cut(data, whole):
        match = watched.feed(piece)
        if match:
            end = len(known) + match[0]
            assert (end - len(match[1]), end, match[1]) == first_stop(whole, stops)
            return
        known += piece
        assert watched.held == naive_held(known, stops) == text.held_back(known, stops)
    assert first_stop(whole, stops) is None


@settings(max_examples=300)
@given(words, words, some_stops)
def test_a_stop_string_counts_only_if_it_ends_where_the_text_may_end(early, late, stops):
    watched = text.StopStrings(stops)
    assert watched.feed(early, may_end=False) is None
    match = watched.feed(late)
    ends = [
        (end, -len(stop), stop)
        for stop in stops
        for end in range(1, len(late) + 1)
        if (early + late[:end]).endswith(stop)
    ]
    expected = min(ends, default=None)
    assert match == (expected and (expected[0], expected[2]))


@settings(max_examples=200)
@given(words, some_stops)
def test_text_shown_early_is_never_taken_back(whole, stops):
    shown, watched = "", text.StopStrings(stops)
    for end in range(1, len(whole) + 1):
        match = watched.feed(whole[end - 1])
        now = whole[: end - (len(match[1]) if match else watched.held)]
        assert now.startswith(shown)
        shown = now
        if match:
            return


@pytest.mark.parametrize(
    "stops",
    [["q" * 100_000], [f"{'ab' * 500}{n}" for n in range(64)], [f"{n}" * 1000 for n in range(64)]],
    ids=["long", "periodic", "other"],
)
def test_a_piece_costs_its_own_length_whatever_the_stop_strings_are(stops):
    watched = text.StopStrings(stops)
    watched.feed("ab" * 499)  # the first piece reads the stop strings
    begin = time.process_time()
    for _ in range(200):
        assert watched.feed("abab") is None
    assert time.process_time() - begin < 0.5


@pytest.mark.parametrize(("include", "shown"), [(False, "one "), (True, "one two")])
def test_the_text_ends_before_the_stop_string_or_with_it(include, shown):
    params = SamplingParams(stop="two", include_stop_str_in_output=include)
    transcript = Transcript(params, (65,), Bytes(), frozenset())
    assert transcript.read(answer(b"one two three")) is True
    assert transcript.text == shown
    assert transcript.output(0, False).token_ids == list(b"one two")
    assert (transcript.finish_reason, transcript.stop_reason) == ("stop", "two")
    assert transcript.read(answer(b"one two three four")) is False


def test_a_stop_string_is_found_in_a_last_token_that_begins_another_character():
    words = Words(b"A", b"one", b"two" + "€".encode()[:1])
    transcript = Transcript(SamplingParams(stop="two"), (0,), words, frozenset())
    assert transcript.read(answer([1, 2], finish_reason="length")) is True
    assert (transcript.text, transcript.finish_reason) == ("one", "stop")


@pytest.mark.parametrize(
    ("settings", "shown", "reason"),
    [
        ({}, "ab", None),
        ({"include_stop_str_in_output": True}, "abz", None),
        ({"ignore_eos": True}, "ab", 122),
    ],
)
def test_a_stop_token_is_in_the_ids_and_not_in_the_text(settings, shown, reason):
    eos = frozenset() if settings.get("ignore_eos") else frozenset(b"z")
    transcript = Transcript(SamplingParams(**settings), (65,), Bytes(), eos)
    transcript.read(answer(b"abz", finish_reason="stop", stop_token=122))
    output = transcript.output(0, False)
    assert (output.text, output.token_ids) == (shown, list(b"abz"))
    assert (output.finish_reason, output.stop_reason) == ("stop", reason)


def answer(tokens, finish_reason=None, stop_token=None):
    """An answer with one round per token and no drafts."""
    count = len(tokens)
    steps = (np.zeros(count, int), np.zeros(count, int))
    return Answer(
        np.array(list(tokens)),
        steps,
        4,
        finish_reason,
        stop_token,
    )
