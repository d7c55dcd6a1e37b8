"""A chat template in the manner of Qwen3's, with reasoning and tools, and a tokenizer of bytes."""

import functools

from transformers import PreTrainedTokenizerFast

from training.data.tokenizer import train_tokenizer

# Reasoning stays behind the last question only; calls and their results belong to its answer.
TEMPLATE = """
{%- if tools %}
    {{- '<|im_start|>system\\nTools:' }}
    {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last_question=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set ns.last_question = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last_question and (loop.last or message.reasoning_content) %}
            {{- '<think>\\n' + (message.reasoning_content or '') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '<call>' + call.function.name + ARGUMENTS + '</call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<result>' + message.content + '</result><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
OBJECTS = TEMPLATE.replace("ARGUMENTS", "(call.function.arguments | tojson)")
TEXTS = TEMPLATE.replace("ARGUMENTS", "call.function.arguments")  # joins text to text
_TURN, _RESULT = "{{- '<|im_start|>assistant\\n' }}", "{%- elif message.role == 'tool'"
MARKED = OBJECTS.replace(f"{_TURN}\n", f"{_TURN}{{% generation %}}\n", 1).replace(
    f"{{{{- '<|im_end|>\\n' }}}}\n    {_RESULT}",
    f"{{{{- '<|im_end|>' }}}}{{% endgeneration %}}{{{{- '\\n' }}}}\n    {_RESULT}",
)
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
USER = {"role": "user", "content": "2 + 2?"}
CALL = {
    "role": "assistant",
    "content": None,
    "reasoning_content": "I add.",
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}],
}
RESULT = {"role": "tool", "content": "4", "tool_call_id": "call-1"}
ANSWER = {"role": "assistant", "content": "It is 4.", "reasoning_content": "The tool says 4."}
LATER = {"role": "user", "content": "And 3 + 3?"}
LAST = {"role": "assistant", "content": "6", "reasoning": "Easy."}
DIALOGUE = [USER, CALL, RESULT, ANSWER, LATER, LAST]


@functools.cache
def tokenizer(template: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes with the template."""
    return PreTrainedTokenizerFast(
        tokenizer_object=train_tokenizer(["2 + 2"], 257),
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )
