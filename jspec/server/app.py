"""The API as an ASGI application."""

import functools
import gc
from collections.abc import Awaitable, Callable, Sequence
from importlib import metadata
from typing import Annotated, Any

import pydantic_core
from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import Field

from jspec.server import (
    chat,
    completions,
    errors,
    fields,
    middleware,
    prompts,
    responses,
    sizes,
)
from jspec.server.errors import RequestError, refusals
from jspec.server.gate import Gate
from jspec.server.serving import SHORT_BYTES, Server

_VERSION = metadata.version("jspec-decoding")


class _JsonRequest(Request):
    async def json(self) -> Any:
        """Parse the body strictly: no NaN, no half of a surrogate pair, no endless nesting.

        Its sizes are checked before its fields are.
        """
        body, server = await self.body(), self.app.state.server

        def parsed() -> Any:
            given = _from_json(body)
            sizes.check(server, given)
            return given

        return parsed() if len(body) <= SHORT_BYTES else await server.in_thread(parsed)


def _from_json(body: bytes) -> Any:
    """Parse JSON, without garbage collection while a long body becomes objects.

    That would take ten times as long as the parser, and hold the interpreter.
    """
    is_collecting = gc.isenabled() and len(body) > SHORT_BYTES
    if is_collecting:
        gc.disable()
    try:
        return pydantic_core.from_json(body, allow_inf_nan=False)
    finally:
        if is_collecting:
            gc.enable()


class _JsonRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:
        """Have bodies parsed by ``_JsonRequest``."""
        handle = super().get_route_handler()

        async def parsing(request: Request) -> Response:
            return await handle(_JsonRequest(request.scope, request.receive))

        return parsing


def create(
    server: Server,
    *,
    root_path: str = "",
    has_docs: bool = True,
    cors: middleware.Cors | None = None,
    middlewares: Sequence[Any] = (),
    **limits: Any,
) -> Gate:
    """Return the application.

    Args:
      server: answers.
      root_path: of a proxy.
      has_docs: whether there are /docs, /redoc and /openapi.json.
      cors: what pages of other origins may do; None for nothing.
      middlewares: classes of ASGI, or functions of a request and of what answers it.
      limits: arguments of ``Gate``.
    """
    hidden = {} if has_docs else dict(openapi_url=None, docs_url=None, redoc_url=None)
    app = FastAPI(title="jspec", version=_VERSION, root_path=root_path, **hidden)
    app.state.server = server
    errors.install(app)
    for router in (_generation(server), _tokens(server), _state(server)):
        app.include_router(router)
    if server.settings.has_dev_endpoints:
        app.include_router(_development(server))
    wrap = functools.partial(middleware.around, cors=cors, middlewares=middlewares)
    return Gate(app, server, wrap=wrap, **limits)


def _generation(server: Server) -> APIRouter:
    """Return the endpoints that generate texts."""
    router = APIRouter(route_class=_JsonRoute)

    @router.post("/v1/completions", response_model=None)
    async def complete(body: fields.CompletionFields) -> dict[str, Any] | Response:
        return await _answered(server, completions.answer(server, body))

    @router.post("/v1/chat/completions", response_model=None)
    async def converse(body: fields.ChatFields) -> dict[str, Any] | Response:
        return await _answered(server, chat.answer(server, body))

    @router.post("/v1/responses", response_model=None)
    async def respond(body: fields.ResponseFields) -> dict[str, Any] | Response:
        return await _answered(server, responses.answer(server, body))

    return router


async def _answered(server: Server, answer: Awaitable[Any]) -> Response:
    try:
        answered = await answer
        if isinstance(answered, Response):
            return answered
        return await server.in_thread(lambda: JSONResponse(answered))
    except Exception as error:
        return errors.of(error).response


def _tokens(server: Server) -> APIRouter:
    """Return the endpoints about models and their tokens."""
    router = APIRouter(route_class=_JsonRoute)

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(server, n) for n in server.settings.model_names]}

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        server.check_model(name)
        return _model(server, name)

    @router.post("/tokenize", response_model=None)
    async def tokenize(body: fields.TokenizeFields) -> Response:
        body.check()
        server.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("send prompt or messages, one of them.", param="prompt")
        return await server.in_thread(lambda: JSONResponse(_tokenized(server, body)))

    @router.post("/detokenize")
    async def detokenize(body: fields.DetokenizeFields) -> dict[str, Any]:
        body.check()
        server.check_model(body.model)
        return {"prompt": await server.in_thread(lambda: _detokenized(server, body.tokens))}

    return router


def _tokenized(server: Server, body: fields.TokenizeFields) -> dict[str, Any]:
    """Return the answer of /tokenize. A text may be longer than the model."""
    if body.messages is None:
        special = body.add_special_tokens is not False
        ids = prompts.encode(server, body.prompt, special, must_fit=False)
    else:
        ids = prompts.of_chat(server, body)["prompt_token_ids"]
    texts = None
    if body.return_token_strs:
        texts = server.llm.get_tokenizer().convert_ids_to_tokens(ids)
    most = server.llm.max_model_len
    return {"count": len(ids), "max_model_len": most, "tokens": ids, "token_strs": texts}


def _detokenized(server: Server, tokens: list[int]) -> str:
    """Return the text of tokens."""
    size = server.llm.build.plan.target.vocab_size
    wrong = next((token for token in tokens if not 0 <= token < size), None)
    if wrong is not None:
        message = f"tokens hold {wrong}, outside the vocabulary of {size}."
        raise RequestError(message, param="tokens")
    with refusals():
        return server.llm.get_tokenizer().decode(tokens)


def _model(server: Server, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": server.created,
        "owned_by": "jspec",
        "root": server.model_name,
        "parent": None,
        "max_model_len": server.llm.max_model_len,
        "permission": [],
    }


def _state(server: Server) -> APIRouter:
    """Return the endpoints that probes and monitors read."""
    router = APIRouter()

    @router.get("/health")
    @router.get("/ping")
    @router.post("/ping")
    async def health() -> Response:
        return Response(status_code=200 if server.served.error is None else 503)

    @router.get("/version")
    async def version() -> dict[str, str]:
        return {"version": _VERSION}

    @router.get("/load")
    async def load() -> dict[str, int]:
        return {"server_load": server.served.num_running}

    @router.get("/metrics")
    async def metrics() -> Response:
        return PlainTextResponse(server.observer.text(), media_type=CONTENT_TYPE_LATEST)

    return router


def _development(server: Server) -> APIRouter:
    """Return endpoints that change the server for all clients."""
    router = APIRouter(route_class=_JsonRoute)

    @router.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> Response:
        await server.served.in_thread(server.llm.reset_prefix_cache)
        return Response(status_code=200)

    @router.post("/abort_requests")
    async def abort_requests(
        body: Annotated[fields.AbortFields | None, Field()] = None,
    ) -> dict[str, Any]:
        ids = server.served.running_ids if body is None else body.request_ids
        ids = server.served.running_ids if ids is None else ids
        for id in ids:
            server.served.abort(id)
        return {"aborted": len(ids)}

    @router.get("/server_info")
    async def server_info() -> dict[str, Any]:
        plan = server.llm.build.plan
        return {
            "version": _VERSION,
            "models": list(server.settings.model_names),
            "max_model_len": server.llm.max_model_len,
            "max_num_seqs": server.llm.max_num_seqs,
            "target": type(plan.target).__name__,
            "drafter": type(plan.drafter).__name__,
            "rule": plan.rule if isinstance(plan.rule, str) else plan.rule.name,
            "defaults": dict(server.settings.defaults),
        }

    return router
