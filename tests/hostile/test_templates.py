"""Tests that malicious chat templates stay in their sandbox."""

import pytest

from jspec.checkpoints import checkpoint
from tests import llm_fixtures
from tests.hostile.junk import refused
from training.data.chat import ChatTemplate

TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
ESCAPES = [
    "{{ cycler.__init__.__globals__.os.popen('touch {mark}').read() }}",
    "{{ self.__init__.__globals__.__builtins__.open('{mark}', 'w') }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ namespace.__init__.__globals__['sys'].modules['os'].system('touch {mark}') }}",
    "{{ messages.append('x') }}",
    "{% include '/etc/passwd' %}",
    "{% import '/etc/passwd' as x %}",
]
ENDLESS = [
    "{% for i in range(10 ** 9) %}{% endfor %}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ raise_exception('no\n' * 5000) }}",
    "{% for",
    "{{ undefined.attribute }}",
    "{{ 1 / 0 }}",
]


@pytest.mark.parametrize("template", ESCAPES + ENDLESS, ids=lambda template: template[:30])
def test_malicious_templates_have_no_effect_and_give_one_line(root, tmp_path, template):
    mark = tmp_path / "ran"
    template = template.replace("{mark}", str(mark))
    message = refused(llm_fixtures.llm(root, "none").chat, TALK[:1], chat_template=template)
    assert "the chat template refuses the messages" in message
    tokenizer = checkpoint.load_tokenizer(llm_fixtures.checkpoints(root)["target"])
    refused(ChatTemplate(tokenizer, template)._render, TALK)
    assert not mark.exists()
