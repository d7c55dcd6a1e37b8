"""The held-out split shares no prompt with training."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.training import words
from training.data.settings import DataSettings, open_data
from training.data.split import are_linked, is_held_out, linked

QUESTIONS = [
    f"{a} {b} {c}"
    for a in ("hi", "how", "bye", "be", "kind")
    for b in ("you", "there")
    for c in ("fine", "are")
]
ANSWERS = ("hi", "there", "how", "are", "you", "fine", "bye", "be", "kind", "###")
# A template that never shows the message of the system.
DEAF = "{% for m in messages if m.role != 'system' %}" + words.PLAIN.partition("%}")[2]
USER, ASSISTANT, SYSTEM = (
    lambda text, role=role: {"role": role, "content": text}
    for role in ("user", "assistant", "system")
)


def opened(folder, *files, template=words.PLAIN, **options):
    """Return the data of files of records."""
    names = []
    for number, lines in enumerate(files):
        path = folder / f"data{number}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        names.append(str(path))
    options = {"length": 64, "packing": "none", "cache": str(folder / "cache")} | options
    if options.pop("last_is_held_out", False):
        options["held_out_data"] = (names.pop(),)
    tokenizer = words.tokenizer(template)
    return open_data(DataSettings(data=tuple(names), **options), tokenizer, len(words.IDS))


def prompts(rows):
    """Return the tokens before the first label of each document."""
    found = []
    for row in map(rows.__getitem__, range(len(rows))):
        count = int(np.flatnonzero(row.weights)[0])
        found.append(tuple(row.tokens[:count].tolist()))
    return found


def of_chat(question, answer):
    return {"messages": [USER(question), ASSISTANT(answer)]}


def of_pair(question, answer):
    return {"question": question, "answer": answer}


def of_system(question, answer):
    return {"messages": [SYSTEM(answer), USER(question), ASSISTANT(answer)]}


def of_dialogue(question, answer):
    turns = [USER(question), ASSISTANT(answer), USER(answer), ASSISTANT("bye")]
    return {"messages": turns, "id": answer}


def of_tokens(question, answer):
    return {
        "prompt_token_ids": words.ids(*question.split()),
        "token_ids": words.ids(answer),
        "key": f"row-{answer}",
    }


@pytest.mark.parametrize("template", [words.PLAIN, words.MARKED, words.FORGETFUL, DEAF])
@pytest.mark.parametrize("line", [of_chat, of_pair, of_system, of_dialogue, of_tokens])
def test_all_answers_to_a_question_are_on_one_side(tmp_path, line, template):
    lines = [line(question, answer) for question in QUESTIONS for answer in ANSWERS]
    data = opened(tmp_path, lines, template=template, held_out_share=0.2)
    train, held = set(prompts(data.train)), set(prompts(data.held_out))
    assert held and not train & held
    split = data.description["split"]
    assert split["prompts_on_both_sides"] == 0
    # A question of several turns has several prompts in a template that rewrites them.
    assert split["held_out_prompts"] >= 1
    if not (line is of_system and template != DEAF):  # there each system has its own prompts
        assert split["train_prompts"] + split["held_out_prompts"] >= len(QUESTIONS)


def test_the_first_question_of_a_conversation_decides_its_side(tmp_path):
    single = [of_chat(question, "bye") for question in QUESTIONS]
    double = [of_dialogue(question, answer) for question in QUESTIONS for answer in ANSWERS]
    data = opened(tmp_path, single, double, held_out_share=0.3)
    sides = [set(prompts(rows)) for rows in (data.train, data.held_out)]
    assert not sides[0] & sides[1] and len(sides[0] | sides[1]) == len(QUESTIONS)
    assert len(data.held_out) == 11 * len(sides[1])


def test_a_question_in_the_held_out_data_is_not_trained_on_whatever_the_answer(tmp_path):
    train = [of_chat(question, answer) for question in QUESTIONS for answer in ANSWERS]
    held = [of_pair(question, "###") for question in QUESTIONS[:4]]
    data = opened(tmp_path, train, held, last_is_held_out=True)
    assert not set(prompts(data.train)) & set(prompts(data.held_out))
    assert len(data.train) == 160
    assert data.description["split"]["documents_left_out_of_training"] == 40


def test_answers_that_are_not_learned_belong_to_the_prompt(tmp_path):
    shown = [USER("hi"), ASSISTANT("there") | {"weight": 0}]
    lines = [{"messages": [*shown, USER(q), ASSISTANT("bye")]} for q in QUESTIONS]
    data = opened(tmp_path, lines, held_out_share=0.3)
    assert len(data.train) + len(data.held_out) == len(QUESTIONS) and len(data.held_out) > 1


@given(
    lines=st.lists(
        st.tuples(
            st.sampled_from([of_chat, of_pair, of_system, of_dialogue, of_tokens]),
            st.sampled_from(QUESTIONS[:8]),
            st.sampled_from(ANSWERS[:4]),
        ),
        min_size=12,
        max_size=40,
    ),
    template=st.sampled_from([words.PLAIN, words.FORGETFUL, DEAF]),
    share=st.sampled_from([0.2, 0.5]),
)
@settings(max_examples=25)
def test_no_mixture_of_records_puts_a_prompt_on_both_sides(
    tmp_path_factory, lines, template, share
):
    folder = tmp_path_factory.mktemp("mixed")
    chats = [line(*words) for line, *words in lines if line is not of_tokens]
    others = [line(*words) for line, *words in lines if line is of_tokens]
    files = [file for file in (chats, others) if file]
    try:
        data = opened(folder, *files, template=template, held_out_share=share)
    except ValueError as error:  # all questions are on one side
        assert "holds out none" in str(error) or "all of it is held out" in str(error)
        return
    assert not set(prompts(data.train)) & set(prompts(data.held_out))


hashes = st.lists(st.tuples(st.integers(0, 9), st.integers(10, 19)), min_size=1, max_size=12)


@given(hashes, hashes)
def test_documents_are_linked_by_shared_hashes_and_by_nothing_else(first, second):
    def closure(pairs):
        groups = [set(pair) for pair in pairs]
        for _ in groups:
            groups = [set().union(*(g for g in groups if g & group)) for group in groups]
        return groups

    table = np.random.default_rng(0).integers(0, 2**64, 20, np.uint64)  # hashes are far apart
    pairs, count = first + second, len(first)
    names, groups = linked(table[np.array(pairs)]), closure(pairs)
    assert all(
        (names[i] == names[j]) == bool(groups[i] & groups[j])
        for i in range(len(pairs))
        for j in range(len(pairs))
    )
    met = are_linked(table[np.array(first)], table[np.array(second)])
    assert met.tolist() == [any(g & other for other in groups[count:]) for g in groups[:count]]


def test_documents_with_one_hash_are_held_out_by_it_alone():
    hashes = np.random.default_rng(0).integers(0, 2**64, 2000, np.uint64)
    held = is_held_out(np.stack([hashes, hashes], 1), 0.1)
    assert (held == (hashes.astype(np.float64) / 2.0**64 < 0.1)).all() and 150 < held.sum() < 250
