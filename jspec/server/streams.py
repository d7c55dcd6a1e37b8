"""Streams of all endpoints: the pieces of texts that grow, and the events that are made of them."""

import dataclasses
import json
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from typing import Any

from starlette.responses import StreamingResponse

from jspec.api.outputs import CompletionOutput, Logprob, RequestOutput
from jspec.server import errors, usage
from jspec.server.fields import GenerationFields
from jspec.server.serving import Batch, Server

Event = dict[str, Any]


@dataclasses.dataclass
class Piece:
    """The part of a text that is new since the piece before.

    ``is_first`` is True for the first piece that is not empty. The last piece alone has a
    ``finish_reason`` and a ``stop_reason``.
    """

    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None
    is_first: bool
    output: CompletionOutput
    finish_reason: str | None
    stop_reason: int | str | None

    @property
    def is_empty(self) -> bool:
        """True if nothing is new."""
        return not (self.text or self.token_ids or self.finish_reason)


class Cursor:
    """Cuts the growing outputs of one text into pieces.

    A text that ended stays among the outputs while other texts of its request run; its pieces are
    empty then.
    """

    def __init__(self) -> None:
        self._num_characters = self._num_tokens = 0
        self._is_first, self._is_ended = True, False

    def advance(self, output: CompletionOutput) -> Piece:
        """Return what is new."""
        tokens = slice(self._num_tokens, None)
        is_open = not self._is_ended
        piece = Piece(
            text=output.text[self._num_characters :],
            token_ids=list(output.token_ids[tokens]),
            logprobs=None if output.logprobs is None else output.logprobs[tokens],
            is_first=self._is_first,
            output=output,
            finish_reason=output.finish_reason if is_open else None,
            stop_reason=output.stop_reason if is_open else None,
        )
        self._num_characters = max(self._num_characters, len(output.text))
        self._num_tokens = max(self._num_tokens, len(output.token_ids))
        self._is_first &= piece.is_empty  # an empty piece is not sent
        self._is_ended |= output.finish_reason is not None
        return piece


def whole(output: CompletionOutput) -> Piece:
    """Return a text as one piece."""
    return Cursor().advance(output)


class Form:
    """The form of the answer to one request, which makes the events of its stream.

    ``grow`` returns those of a piece that is not empty, of the prompt with an index, and ``end``
    those after the last outputs of all prompts.
    """

    is_named = False  # whether an event has its type as a name, and no "[DONE]" ends the stream

    def begin(self) -> Iterable[Event]:
        """Return the events before any output."""
        return ()

    def first(self, output: RequestOutput) -> Iterable[Event]:
        """Return the events between the first output and its pieces."""
        return ()


class ChoicesForm(Form):
    """The form of an answer with choices: an event has a part of one, and maybe the usage."""

    event_head: Mapping[str, Any]  # the fields that begin each event

    def __init__(self, server: Server, fields: GenerationFields):
        self._server, self._fields = server, fields
        self._is_counted, self._is_always_counted = usage.in_events(
            fields.stream_options, is_forced=server.settings.forces_usage
        )

    def usage(self, outputs: Iterable[RequestOutput]) -> dict[str, Any]:
        """Return ``usage`` for outputs so far."""
        return usage.of(outputs, has_stats=bool(self._fields.speculative_decoding_stats))

    def end(self, outputs: Sequence[RequestOutput]) -> Iterator[Event]:
        """Yield the event of the usage, if there is one."""
        if self._is_counted:
            yield {**self.event_head, "choices": [], "usage": self.usage(outputs)}

    def _event(
        self,
        choice: dict[str, Any],
        output: RequestOutput,
        texts: Sequence[CompletionOutput],
        **more: Any,
    ) -> Event:
        """Return an event; its usage counts some texts of the output."""
        event = {**self.event_head, "choices": [choice], **more}
        if self._is_counted:
            counted = dataclasses.replace(output, outputs=list(texts))
            event["usage"] = self.usage([counted]) if self._is_always_counted else None
        return event


async def events_of(batch: Batch, form: Form) -> AsyncIterator[Event]:
    """Yield the events of a batch as its texts grow."""
    for event in form.begin():
        yield event
    cursors: dict[tuple[int, int], Cursor] = {}
    last: dict[int, RequestOutput] = {}
    async for index, output in batch.outputs():
        if not last:
            for event in form.first(output):
                yield event
        last[index] = output
        for text in output.outputs:
            piece = cursors.setdefault((index, text.index), Cursor()).advance(text)
            if not piece.is_empty:
                for event in form.grow(index, output, piece):
                    yield event
    for event in form.end(list(last.values())):
        yield event


class Events(StreamingResponse):
    """Server-sent events of a batch; an error after the first one is an event too."""

    def __init__(self, batch: Batch, form: Form):
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        lines = _lines(batch, form)
        super().__init__(lines, media_type="text/event-stream", headers=headers)
        self._batch = batch

    async def __call__(self, *request: Any) -> None:
        """Send the events; the batch ends with them, and with the connection."""
        try:
            await super().__call__(*request)
        finally:
            self._batch.close()


async def _lines(batch: Batch, form: Form) -> AsyncIterator[str]:
    try:
        async for event in events_of(batch, form):
            yield (f"event: {event['type']}\n" if form.is_named else "") + _line(event)
    except Exception as error:
        yield _line(errors.of(error).body)
    if not form.is_named:
        yield "data: [DONE]\n\n"


def _line(event: Event) -> str:
    return f"data: {json.dumps(event, separators=(',', ':'))}\n\n"
