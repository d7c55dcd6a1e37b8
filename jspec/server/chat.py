"""/v1/chat/completions."""

import dataclasses
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from starlette.responses import Response

from jspec.api.outputs import RequestOutput
from jspec.server import prompts, readers, sampling, scores
from jspec.server.errors import RequestError
from jspec.server.fields import ChatFields
from jspec.server.parts import PartReader, Parts
from jspec.server.serving import Batch, Server
from jspec.server.streams import ChoicesForm, Event, Events, Piece, whole
from jspec.server.tool_calls import Use, use_of


async def answer(server: Server, fields: ChatFields) -> dict[str, Any] | Response:
    """Answer a conversation: whole, or as events with ``stream``.

    Raises:
      RequestError: the request is refused, or its text failed.
    """
    batch, form = await begun(server, fields)
    if fields.stream:
        return Events(batch, form)
    (output,) = await batch.last()
    return await server.in_thread(lambda: form.body(output))


async def begun(server: Server, fields: ChatFields) -> tuple[Batch, "Form"]:
    """Check a request and queue it; return it with the form of its answer."""
    fields.check()
    server.check_model(fields.model)
    if fields.top_logprobs and not fields.logprobs:
        raise RequestError("top_logprobs needs logprobs: true.", param="top_logprobs")
    if fields.stream and fields.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs are not streamed.", param="prompt_logprobs")
    use = use_of(
        fields.tools,
        fields.tool_choice,
        parser=server.settings.tool_parser,
        is_parallel=fields.parallel_tool_calls is not False,
    )
    shown = fields if fields.tool_choice != "none" else fields.model_copy(update={"tools": None})
    prompt = await server.in_thread(lambda: prompts.of_chat(server, shown))
    name = "max_tokens" if fields.max_completion_tokens is None else "max_completion_tokens"
    asked = getattr(fields, name)
    options = dict(
        max_tokens=server.room(len(prompt["prompt_token_ids"]), asked, name),
        logprobs=(fields.top_logprobs or 0) if fields.logprobs else None,
        structured_outputs=use.structured_outputs,
    )
    if (use.reader and not use.structured_outputs) or _has_special_marks(server):
        options["skip_special_tokens"] = False  # marks of calls may be special tokens
    params = await server.served.in_thread(
        lambda: sampling.params_of(fields, server.settings.defaults, **options),
        compiles=fields.has_grammar or bool(use.structured_outputs),
    )
    id = f"chatcmpl-{fields.request_id or uuid.uuid4().hex}"
    reasoner = _reasoner(server, fields, prompt["prompt"], bool(params.structured_outputs))
    batch = await server.submit([prompt], [params], fields, id)
    return batch, Form(server, fields, use, reasoner, id)


def _has_special_marks(server: Server) -> bool:
    """Return whether decoding would drop the marks of reasoning."""
    if server.settings.reasoning_parser is None:
        return False
    special = set(server.llm.get_tokenizer().all_special_tokens)
    reader = readers.REASONING[server.settings.reasoning_parser]
    return not special.isdisjoint((reader.begin, reader.end))


def _reasoner(
    server: Server, fields: ChatFields, prompt: str, has_grammar: bool
) -> Callable[[], readers.ReasoningReader] | None:
    """Return what makes readers of reasoning; None if the server has none.

    A grammar holds from the first token, so it leaves no room for reasoning that it does not name.
    """
    name = server.settings.reasoning_parser
    if name is None:
        if fields.include_reasoning is False:
            raise RequestError(
                "include_reasoning: false needs a reader of reasoning; start the server with "
                "--reasoning-parser.",
                param="include_reasoning",
            )
        return None
    reader = readers.REASONING[name]
    variables = {**server.settings.template_variables, **(fields.chat_template_kwargs or {})}
    is_open = not has_grammar and reader.begins_after(prompt, variables)
    return lambda: reader(is_open)


class Form(ChoicesForm):
    """The form of the answer to one request."""

    def __init__(
        self,
        server: Server,
        fields: ChatFields,
        use: Use,
        reasoner: Callable[[], readers.ReasoningReader] | None,
        id: str,
    ):
        super().__init__(server, fields)
        self._use, self._reasoner = use, reasoner
        as_ids = bool(fields.return_tokens_as_token_ids)
        self._names = scores.TokenNames(server.llm.get_tokenizer(), as_ids)
        self._readers: dict[int, PartReader] = {}  # a reader for each text
        shows_reasoning = reasoner is None or fields.include_reasoning is not False
        self._reads = dict(
            is_parallel=fields.parallel_tool_calls is not False, shows_reasoning=shows_reasoning
        )
        # Tokens and their scores would show the reasoning too.
        self._shows_tokens = bool(fields.return_token_ids) and shows_reasoning
        self._shows_scores = shows_reasoning
        common = dict(id=id, created=int(time.time()), model=server.model_name)
        self.head = {**common, "object": "chat.completion"}
        self.event_head = {**common, "object": "chat.completion.chunk"}

    def first(self, output: RequestOutput) -> Iterator[Event]:
        """Yield the roles of all choices."""
        more = {}
        if self._fields.return_token_ids:  # beside the choices, as vLLM has it
            more = {"prompt_token_ids": output.prompt_token_ids}
        for text in output.outputs:
            delta = {"role": "assistant", "content": ""}
            role = {"index": text.index, "delta": delta, "logprobs": None, "finish_reason": None}
            yield self._event(role, output, [], **more)

    def grow(self, index: int, output: RequestOutput, piece: Piece) -> Iterator[Event]:
        """Yield the parts of a piece, each in an event."""
        for choice in self._deltas(piece):
            yield self._event(choice, output, [piece.output])

    def body(self, output: RequestOutput) -> dict[str, Any]:
        """Return the whole answer."""
        choices = [self.choice(whole(text)) for text in output.outputs]
        body = {**self.head, "choices": choices, "usage": self.usage([output])}
        if self._fields.prompt_logprobs is not None:
            body["prompt_logprobs"] = scores.of_prompt(output.prompt_logprobs)
        if self._fields.return_token_ids:
            body["prompt_token_ids"] = output.prompt_token_ids
        return body

    def choice(self, piece: Piece) -> dict[str, Any]:
        """Return a whole text."""
        parts = self.read(piece)
        content = parts.content if parts.content or not (parts.calls or parts.reasoning) else None
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if self._reasoner is not None:
            message["reasoning"] = parts.reasoning or None
        if parts.calls:
            message["tool_calls"] = [call.body() for call in parts.calls]
        return self._choice(piece, parts.finish_reason, {"message": message})

    def read(self, piece: Piece) -> Parts:
        """Return what is new in a text."""
        index = piece.output.index
        if index not in self._readers:
            self._readers[index] = PartReader(self._use, self._reasoner, **self._reads)
        return self._readers[index].feed(piece)

    def usage(self, outputs: Iterable[RequestOutput]) -> dict[str, Any]:
        """Return ``usage`` for outputs so far, with the tokens of their reasoning."""
        outputs = list(outputs)
        counted = super().usage(outputs)
        if self._reasoner is not None:
            tokenizer = self._server.llm.get_tokenizer()
            count = sum(
                self._readers[text.index].num_reasoning_tokens(text.token_ids, tokenizer)
                for output in outputs
                for text in output.outputs
                if text.index in self._readers
            )
            counted["completion_tokens_details"] = {"reasoning_tokens": count}
        return counted

    def _deltas(self, piece: Piece) -> list[dict[str, Any]]:
        """Return the choices of the events for a piece.

        Each has one part that is new: reasoning, content or a delta of a call. The scores and the
        token ids go with the first one, the end with the last one.
        """
        parts = self.read(piece)
        is_plain = self._use.reader is None and self._reasoner is None
        deltas: list[dict[str, Any]] = []
        if parts.reasoning:
            deltas.append({"reasoning": parts.reasoning})
        if parts.content or is_plain:
            deltas.append({"content": parts.content})
        deltas += [{"tool_calls": [delta.body()]} for delta in parts.deltas]
        has_tokens = self._shows_tokens or (piece.logprobs is not None and self._shows_scores)
        if not deltas and (parts.finish_reason or has_tokens):
            deltas = [{}]
        last, rest = len(deltas) - 1, dataclasses.replace(piece, token_ids=[], logprobs=None)
        return [
            self._choice(
                rest if number else piece,
                parts.finish_reason if number == last else None,
                {"delta": delta},
            )
            for number, delta in enumerate(deltas)
        ]

    def _choice(self, piece: Piece, reason: str | None, body: dict[str, Any]) -> dict[str, Any]:
        scored = None
        if piece.logprobs is not None and self._shows_scores:
            count = self._fields.top_logprobs or 0
            content = scores.of_chat(piece.token_ids, piece.logprobs, self._names, count)
            scored = {"content": content, "refusal": None}
        choice = {
            "index": piece.output.index,
            **body,
            "logprobs": scored,
            "finish_reason": reason,
            "stop_reason": piece.stop_reason if reason else None,
        }
        if self._shows_tokens:
            choice["token_ids"] = piece.token_ids
        if self._server.settings.shows_stats and reason:
            choice["speculative_decoding_stats"] = piece.output.speculative_decoding_stats
        return choice
