"""Contents of messages as parts: templates get the form that they read, as in vLLM."""

import pytest

from jspec.api import content

TEXT = [{"role": "user", "content": "hi"}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "hi"}, "you"]}]
PRINTS = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
LOOPS = "{% for m in messages %}{% for p in m.content %}<{{ p['text'] }}>{% endfor %}{% endfor %}"
READS_BOTH = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}<{{ p.text }}>{% endfor %}{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def llm(root):
    from tests.server import live

    return live.llm(root)


SETS = "{% set c = messages[0].content %}{% for p in c %}{{ p.text }}{% endfor %}"
CALLS = (
    "{% macro show(it) %}{% for p in it %}{{ p.text }}{% endfor %}{% endmacro %}"
    "{% for m in messages[0:] %}{{ show(m['content']) }}{% endfor %}"
)
GENERATES = (
    "{% set all = messages %}{% for m in all | list %}"
    "{% generation %}{{ m.content | trim }}{% endgeneration %}{% endfor %}"
)
SPLITS = "{% set m = messages[0] %}{% for w in m.content.split() %}{{ w }}.{% endfor %}"


@pytest.mark.parametrize(
    ("template", "of_text", "of_parts"),
    [
        (PRINTS, "hi", "hi\nyou"),
        (LOOPS, "<hi>", "<hi><you>"),
        (READS_BOTH, "hi", "<hi><you>"),
        ("{{ messages[0]['content'] }}", "hi", "hi\nyou"),
        ("{{ messages[0]['content'][0]['text'] }}", "hi", "hi"),
        ("{{ messages[0].content[0].text }}", "hi", "hi"),
        (SETS, "hi", "hiyou"),
        (CALLS, "hi", "hiyou"),
        (GENERATES, "hi", "hi\nyou"),
        (SPLITS, "hi.", "hi.you."),
    ],
)
def test_a_template_gets_the_form_that_it_reads(llm, template, of_text, of_parts):
    for messages, want in ((TEXT, of_text), (PARTS, of_parts)):
        (prompt,) = llm.chat_prompts(messages, chat_template=template)
        assert prompt["prompt"] == want


@pytest.mark.parametrize(("given", "want"), [("string", "hi\nyou"), ("openai", "[{'type': 'text'")])
def test_the_form_may_be_given(llm, given, want):
    options = dict(chat_template=PRINTS, chat_template_content_format=given)
    (prompt,) = llm.chat_prompts(PARTS, **options)
    assert prompt["prompt"].startswith(want)
    assert llm.chat(PARTS, **options)[0].prompt == prompt["prompt"]


def test_the_result_of_a_tool_is_text(llm):
    messages = [*PARTS, {"role": "tool", "content": [{"type": "text", "text": "4"}]}]
    template = LOOPS + "{{ messages[1].content }}"
    (prompt,) = llm.chat_prompts(messages, chat_template=template)
    assert prompt["prompt"].endswith("4")


def test_messages_of_the_caller_stay_as_they_are(llm):
    before = [dict(message) for message in PARTS]
    llm.chat_prompts(PARTS, chat_template=LOOPS)
    assert before == PARTS


@pytest.mark.parametrize(
    "part",
    [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "text"}, 5],
)
def test_a_part_that_is_no_text_is_refused(llm, part):
    messages = [TEXT[0], {"role": "user", "content": ["hi", part]}]
    with pytest.raises(ValueError, match=r"messages\[1\].content has .* only parts of text"):
        llm.chat(messages)


def test_an_unknown_form_is_refused(llm):
    with pytest.raises(ValueError, match="chat_template_content_format='x' must be one of auto, "):
        llm.chat(TEXT, chat_template_content_format="x")


def test_a_template_that_is_no_jinja_is_refused_when_it_is_rendered(llm):
    assert content.formatted(PARTS, "{% for %}", "auto")[0]["content"] == "hi\nyou"
    with pytest.raises(ValueError, match="the chat template refuses the messages"):
        llm.chat(PARTS, chat_template="{% for %}")
