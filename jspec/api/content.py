"""The content of messages: text, or parts, in the form that a chat template reads."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from jspec.util.messages import shown

FORMATS = ("auto", "string", "openai")
_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


def formatted(
    messages: Sequence[Mapping[str, Any]], template: str | None, content_format: str
) -> list[dict[str, Any]]:
    """Return messages whose contents have the form that a template reads.

    Args:
      messages: of one conversation. Contents are text, or lists of parts of text.
      template: Jinja.
      content_format: "string" joins parts by line breaks, "openai" makes each content a list of
        parts, and "auto" takes the form that the template reads.

    Raises:
      ValueError: a part is no text.
    """
    has_parts, takes_text = content_format == "openai", False
    if content_format == "auto":
        has_parts, takes_text = _reads(template or "")
    result = []
    for index, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        is_text = isinstance(content, str)
        if not is_text and not _is_list(content):
            result.append(message)
            continue
        texts = [content] if is_text else texts_of(f"messages[{index}]", content)
        if has_parts and message.get("role") != "tool" and not (is_text and takes_text):
            new: Any = [{"type": "text", "text": text} for text in texts]
        else:
            new = "\n".join(texts)
        result.append({**message, "content": new})
    return result


def texts_of(where: str, parts: Sequence[Any]) -> list[str]:
    """Return the texts of the parts of a content; raise ValueError for a part that is none."""
    texts = []
    for part in parts:
        text = part
        if isinstance(part, Mapping):
            text = part.get(_TEXTS.get(part.get("type", "text"), ""))
        if not isinstance(text, str):
            raise ValueError(
                f"{where}.content has the part {shown(part, 80)}; only parts of text are "
                'supported, such as {"type": "text", "text": "..."}.'
            )
        texts.append(text)
    return texts


def check_format(value: Any) -> None:
    """Raise ValueError if a value of ``chat_template_content_format`` is unknown."""
    if value not in FORMATS:
        raise ValueError(
            f"chat_template_content_format={shown(value)} must be one of {', '.join(FORMATS)}."
        )


def _is_list(content: Any) -> bool:
    return isinstance(content, Sequence) and not isinstance(content, str | bytes)


@functools.lru_cache(maxsize=32)
def _reads(template: str) -> tuple[bool, bool]:
    """Return whether a template reads parts, and whether it takes text too.

    It reads parts if it loops over the content of a message, or takes an item of it. It takes text
    too if it asks whether a content is a string.
    """
    from jinja2 import nodes
    from transformers.utils import chat_template_utils

    try:
        # The environment of transformers has the tags that templates may use.
        environment = chat_template_utils._compile_jinja_template("").environment
        root = environment.parse(template)
    except Exception:  # rendering will name the reason
        return False, False
    names = _Names(root, nodes)
    loops = any(names.is_content(loop.iter) for loop in root.find_all(nodes.For))
    takes_item = any(
        names.key(each) == "text"
        and isinstance(each.node, nodes.Getitem)
        and names.is_content(each.node.node)
        for each in root.find_all((nodes.Getitem, nodes.Getattr))
    )
    asks = (
        test.name == "string" and names.is_content(test.node) for test in root.find_all(nodes.Test)
    )
    return loops or takes_item, any(asks)


class _Names:
    """The names of a template that stand for messages, for one message, and for a content."""

    def __init__(self, root: Any, nodes: Any):
        self._nodes = nodes
        self._lists, self._messages, self._contents = {"messages"}, set(), {"content"}
        sizes = None
        while sizes != (sizes := self._sizes()):  # a name may be set from a name that comes later
            for each in root.find_all(nodes.Assign):
                self._bind(each.target, each.node)
            for loop in root.find_all(nodes.For):
                if self._is_list(loop.iter):
                    self._messages |= self._of(loop.target)
            macros = {macro.name: macro for macro in root.find_all(nodes.Macro)}
            for call in root.find_all(nodes.Call):
                if isinstance(call.node, nodes.Name) and call.node.name in macros:
                    self._bind_arguments(macros[call.node.name], call)

    def is_content(self, node: Any) -> bool:
        """Return whether an expression is the content of a message."""
        node = self._bare(node)
        if self.key(node) == "content":
            return self._is_message(node.node)
        return isinstance(node, self._nodes.Name) and node.name in self._contents

    def _is_message(self, node: Any) -> bool:
        node = self._bare(node)
        if isinstance(node, self._nodes.Getitem):
            return self._is_list(node.node)
        return isinstance(node, self._nodes.Name) and node.name in self._messages

    def _is_list(self, node: Any) -> bool:
        node = self._bare(node)
        return isinstance(node, self._nodes.Name) and node.name in self._lists

    def _bare(self, node: Any) -> Any:
        """Return an expression without filters, tests and slices around it."""
        nodes = self._nodes
        while isinstance(node, nodes.Filter | nodes.Test) or (
            isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
        ):
            node = node.node
        return node

    def key(self, node: Any) -> Any:
        """Return the constant key of an access; None for other expressions."""
        if isinstance(node, self._nodes.Getattr):
            return node.attr
        is_item = isinstance(node, self._nodes.Getitem) and isinstance(node.arg, self._nodes.Const)
        return node.arg.value if is_item else None

    def _of(self, target: Any) -> set[str]:
        return {target.name} if isinstance(target, self._nodes.Name) else set()

    def _bind(self, target: Any, value: Any) -> None:
        if self._is_list(value):
            self._lists |= self._of(target)
        elif self._is_message(value):
            self._messages |= self._of(target)
        elif self.is_content(value):
            self._contents |= self._of(target)

    def _bind_arguments(self, macro: Any, call: Any) -> None:
        parameters = {each.name: each for each in macro.args}
        given = list(zip(macro.args, call.args, strict=False))
        named = (each for each in call.kwargs if each.key in parameters)
        given += [(parameters[each.key], each.value) for each in named]
        for parameter, value in given:
            self._bind(parameter, value)

    def _sizes(self) -> tuple[int, int, int]:
        return len(self._lists), len(self._messages), len(self._contents)
