"""/v1/completions."""

import dataclasses
import time
import uuid
from collections.abc import Iterable, Iterator
from typing import Any

from starlette.responses import Response

from jspec.api.outputs import RequestOutput
from jspec.api.sampling_params import SamplingParams
from jspec.server import prompts, sampling, scores
from jspec.server.errors import RequestError
from jspec.server.fields import CompletionFields
from jspec.server.serving import Server
from jspec.server.streams import ChoicesForm, Event, Events, Piece, whole


async def answer(server: Server, fields: CompletionFields) -> dict[str, Any] | Response:
    """Answer a request of /v1/completions: whole, or as events with ``stream``.

    Raises:
      RequestError: the request is refused, or its text failed.
    """
    fields.check()
    server.check_model(fields.model)
    if fields.stream and fields.prompt_logprobs is not None:
        raise RequestError(
            "prompt_logprobs are not streamed; send echo with logprobs, or leave stream out.",
            param="prompt_logprobs",
        )
    # A prompt alone is scored with one token after it, which is dropped.
    is_prompt_alone = bool(fields.echo) and fields.max_tokens == 0
    asked = 1 if is_prompt_alone else fields.max_tokens
    given = await server.in_thread(lambda: prompts.of_completion(server, fields))
    params = await server.served.in_thread(
        lambda: _params(server, fields, given, asked),
        compiles=fields.has_grammar,
    )
    id = f"cmpl-{fields.request_id or uuid.uuid4().hex}"
    batch = await server.submit(given, params, fields, id)
    form = _Form(server, fields, id, params[0].n, is_prompt_alone)
    if fields.stream:
        return Events(batch, form)
    outputs = await batch.last()
    choices = await server.in_thread(
        lambda: [
            form.choice(index, output, whole(text))
            for index, output in enumerate(outputs)
            for text in output.outputs
        ]
    )
    return {**form.head, "choices": choices, "usage": form.usage(outputs)}


def _params(
    server: Server, fields: CompletionFields, given: list[prompts.Prompt], max_tokens: int | None
) -> list[SamplingParams]:
    """Return the settings for each prompt: the same ones, however long their lists are."""
    echoed = (
        {} if not fields.echo or fields.logprobs is None else {"prompt_logprobs": fields.logprobs}
    )
    rooms = {server.room(len(prompt["prompt_token_ids"]), max_tokens) for prompt in given}
    options = dict(max_tokens=min(rooms), logprobs=fields.logprobs, **echoed)
    params = sampling.params_of(fields, server.settings.defaults, **options)
    if len(rooms) > 1:  # each text may have all the room there is
        params = dataclasses.replace(params, max_tokens=None)
    return [params] * len(given)


class _Form(ChoicesForm):
    """The form of the answer to one request."""

    def __init__(
        self, server: Server, fields: CompletionFields, id: str, n: int, is_prompt_alone: bool
    ):
        super().__init__(server, fields)
        self._n, self._is_prompt_alone = n, is_prompt_alone
        as_ids = bool(fields.return_tokens_as_token_ids)
        self._tokenizer = server.llm.get_tokenizer()
        self._names = scores.TokenNames(self._tokenizer, as_ids)
        self._offsets: dict[int, int] = {}  # characters of each choice so far
        created = int(time.time())
        self.head = dict(id=id, object="text_completion", created=created, model=server.model_name)
        self.event_head = self.head

    def grow(self, index: int, output: RequestOutput, piece: Piece) -> Iterator[Event]:
        """Yield the event of a piece."""
        yield self._event(self.choice(index, output, piece), output, [piece.output])

    def choice(self, index: int, output: RequestOutput, piece: Piece) -> dict[str, Any]:
        """Return a piece of a text, of the prompt with an index."""
        fields, number = self._fields, index * self._n + piece.output.index
        is_echoed = bool(fields.echo) and piece.is_first
        text, ids, scored = piece.text, piece.token_ids, piece.logprobs
        if self._is_prompt_alone:
            text, ids, scored = "", [], None if scored is None else []
        if is_echoed:
            prompt = output.prompt_token_ids
            text = self._prompt_text(output) + text
            ids = [*prompt, *ids]
            if scored is not None:  # a request that was aborted early has no scores of its prompt
                scored = [*(output.prompt_logprobs or [None] * len(prompt)), *scored]
        choice = {
            "index": number,
            "text": text,
            "logprobs": None if scored is None else self._logprobs(number, ids, scored),
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }
        if fields.return_token_ids:
            choice["token_ids"] = [] if self._is_prompt_alone else piece.token_ids
            choice["prompt_token_ids"] = output.prompt_token_ids if piece.is_first else None
        if fields.prompt_logprobs is not None:
            choice["prompt_logprobs"] = scores.of_prompt(output.prompt_logprobs)
        if self._server.settings.shows_stats and piece.finish_reason:
            choice["speculative_decoding_stats"] = piece.output.speculative_decoding_stats
        return choice

    def usage(self, outputs: Iterable[RequestOutput]) -> dict[str, Any]:
        """Return ``usage`` for outputs so far; the token that scores a prompt does not count."""
        counted = super().usage(outputs)
        if self._is_prompt_alone:
            counted |= {"completion_tokens": 0, "total_tokens": counted["prompt_tokens"]}
        return counted

    def _prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is not None and self._fields.truncate_prompt_tokens is None:
            return output.prompt
        return self._tokenizer.decode(output.prompt_token_ids)

    def _logprobs(self, number: int, ids: list[int], scored: scores.Scores) -> dict[str, Any]:
        offset = self._offsets.get(number, 0)
        listed = scores.of_completion(ids, scored, self._names, offset)
        self._offsets[number] = offset + sum(map(len, listed["tokens"]))
        return listed
