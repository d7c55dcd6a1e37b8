"""Marks of calls and of reasoning are read where they are special tokens of the vocabulary."""

import pytest

import jspec
from jspec.checkpoints import checkpoint
from tests import llm_fixtures
from tests.server import live
from tests.server.live import NAME
from tests.server.test_openai_client import MESSAGES, TOOLS

pytestmark = pytest.mark.slow  # a tokenizer of its own


@pytest.fixture(scope="module")
def marked(llm, root, tmp_path_factory):
    """Return a client of a server whose tokenizer has marks as special tokens, and their ids."""
    path = llm_fixtures.checkpoints(root)["target"]
    tokenizer = checkpoint.load_tokenizer(path)
    marks = ["[TOOL_CALLS]", "</think>"]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    directory = tmp_path_factory.mktemp("marked")
    tokenizer.save_pretrained(directory)
    target = llm_fixtures.loaded(root)["target"]
    sizes = dict(max_num_seqs=3, max_model_len=192)
    own = jspec.LLM(target, live.SPECULATIVE, tokenizer=str(directory), **sizes)
    options = dict(tool_parser="mistral", reasoning_parser="deepseek_r1")
    with live.running(own, **options) as server, server.client() as client:
        yield client, dict(zip(marks, tokenizer.convert_tokens_to_ids(marks), strict=True))


def answered(marked, mark, **options):
    """Return the message of an answer that is one mark."""
    client, ids = marked
    body = {"allowed_token_ids": [ids[mark]]}
    options = dict(model=NAME, messages=MESSAGES, max_tokens=1, extra_body=body) | options
    (choice,) = client.chat.completions.create(**options).choices
    return choice.message


def test_the_mark_that_ends_reasoning_is_seen(marked):
    message = answered(marked, "</think>", max_tokens=2)  # the second one is content
    assert (message.content, message.model_extra["reasoning"]) == ("</think>", None)


def test_the_mark_of_a_call_is_seen(marked):
    message = answered(marked, "[TOOL_CALLS]", tools=TOOLS)
    assert message.model_extra["reasoning"] == "[TOOL_CALLS]"
