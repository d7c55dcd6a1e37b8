"""Middleware of an operator: access from pages of other origins, and code of their own."""

import dataclasses
import inspect
from collections.abc import Sequence
from typing import Any

from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jspec.server import errors
from jspec.util import values
from jspec.util.messages import shown


@dataclasses.dataclass(frozen=True)
class Cors:
    """Access from pages of other origins, with vLLM's defaults; "*" is for all."""

    origins: tuple[str, ...]
    methods: tuple[str, ...] = ("*",)
    headers: tuple[str, ...] = ("*",)
    has_credentials: bool = False


def imported(path: str) -> Any:
    """Return the middleware at a dotted path.

    Raises:
      ValueError: it cannot be imported, or is neither a class nor an ``async`` function.
    """
    middleware = values.imported("--middleware", path)
    if inspect.isclass(middleware) or inspect.iscoroutinefunction(middleware):
        return middleware
    raise ValueError(
        f"--middleware {shown(path)} must be a class of ASGI middleware, or an async function of "
        "(request, call_next)."
    )


def around(app: ASGIApp, cors: Cors | None, middlewares: Sequence[Any]) -> ASGIApp:
    """Return an app within middlewares, the last of them outermost, and all of them within CORS."""
    for each in middlewares:
        app = each(app) if inspect.isclass(each) else BaseHTTPMiddleware(app, dispatch=each)
    if middlewares:  # they may fail; the API answers its own errors
        app = _Answering(app)
    if cors is None:
        return app
    return CORSMiddleware(
        app,
        allow_origins=cors.origins,
        allow_methods=cors.methods,
        allow_headers=cors.headers,
        allow_credentials=cors.has_credentials,
    )


class _Answering:
    """Answers an error of what it wraps. The connection stays, as after the API's own errors."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def noting(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, noting)
        except Exception as error:
            answer = errors.of(error).response
            if has_begun:
                raise
            await answer(scope, receive, send)
