"""The common tokens of two tokenizers: against transformers' mapping, and in ``LLM``."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import jspec
from jspec.drafters.draft_model import vocabularies
from tests import llm_fixtures

TEXT = [*llm_fixtures.SENTENCES, "the dog says that grey foxes are quick and lazy, too. "]


def byte_level(**special):
    """Spaces are written Ġ."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return trained(tokenizer, 300, special, pre_tokenizers.ByteLevel.alphabet())


def metaspace(**special):
    """Spaces are written ▁, as by SentencePiece."""
    tokenizer = Tokenizer(models.BPE(unk_token=special.get("unk_token")))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="never")
    return trained(tokenizer, 160, special)


def trained(tokenizer, size, special, alphabet=()):
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(special.values()),
        show_progress=False,
        initial_alphabet=list(alphabet),
    )
    tokenizer.train_from_iterator([text * 8 for text in TEXT], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


TARGET = byte_level(eos_token="<|end|>")
DRAFT = metaspace(unk_token="<unk>", eos_token="</s>")
SIZES = len(TARGET), len(DRAFT)


class Tokens:
    """A tokenizer that is its vocabulary."""

    def __init__(self, tokens, unk=0, eos=None):
        self.tokens, self.unk_token_id, self.eos_token_id = tokens, unk, eos

    def get_vocab(self):
        return {token: index for index, token in enumerate(self.tokens)}


def share(target=TARGET, draft=DRAFT, sizes=SIZES):
    return vocabularies.share(target, draft, *sizes)


def test_the_common_tokens_are_those_of_transformers():
    pytest.importorskip("torch")
    from transformers.generation.candidate_generator import AssistantToTargetTranslator

    shared = share()
    translator = AssistantToTargetTranslator(TARGET, DRAFT, len(TARGET))
    pairs = dict(zip(shared.target_ids.tolist(), shared.draft_ids.tolist(), strict=True))
    # transformers reads a token's first space only; all spaces of ours are one sign or the other.
    runs = {i for token, i in TARGET.get_vocab().items() if token.count("Ġ") > 1}
    theirs = translator.target_to_assistant_input_ids
    assert {t: d for t, d in pairs.items() if t not in runs} == {
        t: d for t, d in theirs.items() if t not in runs
    }
    assert len(pairs) > 40
    assert (np.diff(shared.target_ids) > 0).all()
    spelled = lambda tokenizer, index: tokenizer.convert_ids_to_tokens(index)
    assert any(spelled(TARGET, t) != spelled(DRAFT, d) for t, d in pairs.items())  # Ġ and ▁
    assert shared.unknown == DRAFT.unk_token_id


def test_of_tokens_with_one_spelling_the_lowest_id_counts_and_the_other_sign_is_a_letter():
    target = {"Ġa": 0, "Ġb": 1, "▁a": 2, "c": 3}
    draft = {" a": 0, "▁a": 1, "▁b": 2, "Ġa": 3, "▁Ġ": 4}
    ours, theirs = vocabularies.intersection(target, draft)
    assert (ours.tolist(), theirs.tolist()) == ([0, 1], [0, 2])


def test_tokens_past_the_vocabulary_of_a_model_are_ignored():
    whole, cut = share(), share(sizes=(SIZES[0], 100))
    in_range = whole.draft_ids < 100
    assert cut.target_ids.tolist() == whole.target_ids[in_range].tolist()
    assert 0 < in_range.sum() < in_range.size


def test_weights_get_the_maps_from_and_to_the_targets_vocabulary():
    shared = share()
    params = shared.translating({"weight": np.zeros(3)}, 310)  # the target is padded
    target_to_draft = np.asarray(params.target_to_draft)
    np.testing.assert_array_equal(target_to_draft[shared.target_ids], shared.draft_ids)
    others = np.setdiff1d(np.arange(310), shared.target_ids)
    assert (target_to_draft[others] == DRAFT.unk_token_id).all()
    np.testing.assert_array_equal(params.draft_to_target, shared.target_ids)
    np.testing.assert_array_equal(params.shared_ids, shared.draft_ids)


@pytest.mark.parametrize(
    ("target", "draft", "message"),
    [
        (None, DRAFT, "but the target has none"),
        (TARGET, None, "but the draft model has none"),
        (TARGET, Tokens("abc", unk=None), "neither an unk_token nor an eos_token"),
        (
            Tokens("xyz"),
            Tokens("abc"),
            "share 0 tokens, of the target's 3 and the draft model's 3; at least 1 are needed",
        ),
        (
            Tokens([f"t{i}" for i in range(100)]),
            Tokens(["t5", *(f"d{i}" for i in range(59))]),
            "share 1 tokens, of the target's 100 and the draft model's 60; at least 3 are needed",
        ),
    ],
)
def test_pairs_that_cannot_draft_are_refused_with_numbers(target, draft, message):
    with pytest.raises(ValueError, match=message):
        share(target, draft, (512, 512))


def test_the_end_of_text_stands_for_unknown_tokens_without_an_unk_token():
    assert share(Tokens("abc"), Tokens("cab", None, 2), (3, 3)).unknown == 2


ABC = Tokens("abc")
VLLM = "Target and draft model should have the same vocabulary size. Target model vocab_size=128."


@pytest.mark.parametrize("tokenizers", [(None, None), (ABC, None), (None, ABC)])
def test_without_both_tokenizers_the_models_sizes_must_agree(tokenizers):
    vocabularies.check_same(128, 128, *tokenizers)
    with pytest.raises(ValueError, match=VLLM):
        vocabularies.check_same(128, 120, *tokenizers)


def test_padded_sizes_may_differ_where_the_tokenizers_agree():
    vocabularies.check_same(128, 120, ABC, Tokens("abc"))
    vocabularies.check_same(128, 120, ABC, Tokens(["a", "b", "c", "extra"]))


def test_tokenizers_that_disagree_are_refused_at_equal_sizes_too():
    with pytest.raises(ValueError) as error:
        vocabularies.check_same(128, 128, ABC, Tokens("acb"))
    assert VLLM in str(error.value)
    assert "Their tokenizers differ first at id 1: 'b' and 'c'." in str(error.value)


# -------------------------------------------------------------------------------- through ``LLM``


@pytest.fixture
def models_(root, tmp_path):
    """A target and a draft model with another tokenizer."""
    target = llm_fixtures.loaded(root)["target"]
    other = tmp_path / "other"
    llm_fixtures.write_model(other, llm_fixtures.DRAFT, 1)
    DRAFT.save_pretrained(other)
    return target, other


def test_llm_drafts_with_a_model_of_another_tokenizer(models_):
    target, other = models_
    config = {"model": str(other), "num_speculative_tokens": 3}
    with pytest.raises(ValueError, match="should have the same vocabulary size"):
        jspec.LLM(target, config)
    config |= {"use_heterogeneous_vocab": True, "rejection_sample_method": "coupled"}
    llm = jspec.LLM(target, json.loads(json.dumps(config)))
    settings = [
        jspec.SamplingParams(temperature=t, max_tokens=24, seed=5, ignore_eos=True)
        for t in (0.0, 0.7, 1.0, 0.0)
    ]
    prompts = ["the quick brown", "def add(x, y):", "grüße", "the the the the"]
    texts = lambda llm: [o.outputs[0].token_ids for o in llm.generate(prompts, settings)]
    assert texts(llm) == texts(jspec.LLM(target))
    counts = {each.name: each for each in llm.get_metrics()}
    assert counts["vllm:spec_decode_num_draft_tokens"].value > 0


def test_a_pair_with_one_vocabulary_drafts_as_without_the_key(models_):
    target, other = models_
    llm_fixtures.write_tokenizer(other)
    config = {"model": str(other), "num_speculative_tokens": 3}
    plans = [
        jspec.LLM(target, config | more).build.plan
        for more in ({}, {"use_heterogeneous_vocab": True})
    ]
    assert plans[0] == plans[1]
