"""Tokenizers in the metadata of GGUF files, against sentencepiece and tokenizers."""

import io
import json
from pathlib import Path

import pytest
import tokenizers

from jspec.checkpoints import gguf_config, gguf_tokenizer
from jspec.checkpoints.gguf_files import GgufFile
from tests.checkpoints.tokenizers_with_llamacpp import TEXTS, TRAINING, spaced

ENDS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def read(**metadata):
    named = {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}
    template = {"tokenizer.chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}"}
    return gguf_tokenizer.read(GgufFile(Path("model.gguf"), named | template, {}))


def ids(tokenizer, text):
    return tokenizer(text, add_special_tokens=False).input_ids


@pytest.fixture(scope="module")
def byte_level():
    """A tokenizer of GPT-2's kind, and its metadata."""
    trained = tokenizers.ByteLevelBPETokenizer()
    trained.train_from_iterator(TRAINING, vocab_size=700, show_progress=False, special_tokens=ENDS)
    vocabulary = trained.get_vocab()
    merges = json.loads(trained.to_str())["model"]["merges"]
    return trained, {
        "model": "gpt2",
        "tokens": sorted(vocabulary, key=vocabulary.get),
        "token_type": [3] * len(ENDS) + [1] * (len(vocabulary) - len(ENDS)),
        "merges": [pair if isinstance(pair, str) else " ".join(pair) for pair in merges],
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def test_byte_level_files_split_texts_as_the_trained_tokenizer(byte_level):
    trained, metadata = byte_level
    tokenizer = read(**metadata, pre="gpt-2")
    for text in [*TRAINING[:2], *TEXTS]:
        assert ids(tokenizer, text) == trained.encode(text).ids
        assert tokenizer.decode(ids(tokenizer, text)) == text


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("smollm", " 1234 is", 6),
        ("llama-bpe", "1234567", 3),
        ("qwen2", "1234", 4),
        ("tekken", "12", 2),
        ("deepseek-v3", "123456", 2),
        ("gpt-4o", "123456", 2),
        ("tiny_aya", "12345", 2),
        ("seed-coder", "1234", 4),
        ("deepseek-llm", "a 12", 4),
        ("dbrx", "1234567", 3),
    ],
)
def test_each_kind_of_split_has_its_own_digits(byte_level, pre, text, pieces):
    splits = read(**byte_level[1], pre=pre).backend_tokenizer.pre_tokenizer
    assert len(splits.pre_tokenize_str(text)) == pieces


def test_texts_are_recovered_by_every_kind_of_split(byte_level):
    for pre in gguf_tokenizer.SPLITS:
        tokenizer = read(**byte_level[1], pre=pre)
        for text in TEXTS:
            composed = tokenizer.backend_tokenizer.normalizer is not None
            if not (composed and "\u0301" in text):
                assert tokenizer.decode(ids(tokenizer, text)) == text, pre


def test_special_tokens_and_the_template_are_those_of_the_file(byte_level):
    tokenizer = read(**byte_level[1], pre="gpt-2")
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert ids(tokenizer, "<|im_start|>") == [1]
    assert tokenizer.decode([2, 1], skip_special_tokens=True) == ""
    chat = [{"role": "user", "content": "Hi"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "Hi"


def test_bos_and_eos_are_added_where_the_file_or_the_kind_says_so(byte_level):
    _, metadata = byte_level
    plain = ids(read(**metadata, pre="gpt-2"), "Hi")
    assert read(**metadata, pre="gpt-2")("Hi").input_ids == plain
    assert read(**metadata, pre="llama-bpe")("Hi").input_ids[0] == 1
    assert read(**metadata, pre="llama-bpe", add_bos_token=False)("Hi").input_ids[0] != 1
    both = read(**metadata, pre="gpt-2", add_bos_token=True, add_eos_token=True)
    assert both("Hi").input_ids == [1, *plain, 2]


def test_the_end_of_text_ids_are_those_named_and_those_of_known_texts(byte_level):
    def ends(**more):
        metadata = {f"tokenizer.ggml.{k}": v for k, v in (byte_level[1] | more).items()}
        return gguf_config.end_ids(GgufFile(Path("model.gguf"), metadata, {}))

    assert ends() == [0, 2]
    assert ends(eot_token_id=5, eom_token_id=7) == [0, 2, 5, 7]
    assert ends(token_type=[]) == [0, 2]
    # llama.cpp takes <|im_end|> for an end whatever its type, and so do we.
    kinds = [3, 3, 4, *byte_level[1]["token_type"][3:]]
    assert ends(token_type=kinds, eos_token_id=0) == [0, 2]
    tokenizer = read(**byte_level[1] | {"token_type": kinds, "eos_token_id": 0}, pre="gpt-2")
    assert ids(tokenizer, "<|im_end|>") == [2]
    assert tokenizer.decode([2], skip_special_tokens=True) == ""


def test_sentencepiece_files_split_texts_as_sentencepiece_does():
    sentencepiece = pytest.importorskip("sentencepiece")
    file = io.BytesIO()
    lines = [line for text in TRAINING for line in text.splitlines() if line]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=file,
        vocab_size=700,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    theirs = sentencepiece.SentencePieceProcessor(model_proto=file.getvalue())
    count = range(theirs.get_piece_size())
    kinds = [6 if theirs.is_byte(i) else 3 if theirs.is_control(i) else 1 for i in count]
    kinds[theirs.unk_id()] = 2
    ours = read(
        model="llama",
        tokens=[theirs.id_to_piece(i) for i in count],
        scores=[theirs.get_score(i) for i in count],
        token_type=kinds,
        bos_token_id=theirs.bos_id(),
        eos_token_id=theirs.eos_id(),
        unknown_token_id=theirs.unk_id(),
    )
    for text in [*lines[:200], *TEXTS]:
        if text:
            assert ids(ours, text) == theirs.encode(text), repr(text)
            assert ours.decode(ids(ours, text)) == text
    assert ours("Hi").input_ids[0] == theirs.bos_id()


def test_files_of_gemma_4_split_texts_as_its_tokenizer_does():
    gemma, metadata = pytest.importorskip("transformers").GemmaTokenizer, spaced()
    vocabulary = {token: index for index, token in enumerate(metadata["tokens"])}
    merges = [tuple(pair.split(" ")) for pair in metadata["merges"]]
    ours, theirs = read(**metadata, add_bos_token=True), gemma(vocab=vocabulary, merges=merges)
    for text in [*TRAINING[:2], *filter(None, TEXTS)]:
        assert ours(text).input_ids == ids(theirs, text), repr(text)
        assert ours.decode(ids(ours, text)) == text


def test_tokenizers_that_are_not_understood_are_refused_by_name(byte_level):
    _, metadata = byte_level
    for change, message in (
        ({"model": "bert"}, "tokenizer.ggml.model 'bert'; known: gpt2, llama, gemma4"),
        ({"pre": "new"}, "splits texts as 'new' .* pass tokenizer= with the original model's"),
        ({"eos_token_id": 9999}, "eos_token_id=9999 is outside the vocabulary of 700"),
        ({"merges": ["no such"]}, "has a damaged tokenizer .*; download it again, or pass token"),
        ({"model": "llama", "scores": [1.0]}, "has 700 tokens and 1 scores; download it again"),
    ):
        with pytest.raises(ValueError, match=message):
            read(**{**metadata, "pre": "gpt-2", **change})
