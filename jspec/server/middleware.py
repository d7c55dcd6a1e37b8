"""Middleware of an operator: access from pages of other origins, and code of their own."""

import dataclasses
import inspect
from collections.abc import Sequence
from typing import Any

from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

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
    if middlewares:  # which may fail; the API answers its own errors
        app = ServerErrorMiddleware(app, handler=_failed)
    if cors is None:
        return app
    return CORSMiddleware(
        app,
        allow_origins=cors.origins,
        allow_methods=cors.methods,
        allow_headers=cors.headers,
        allow_credentials=cors.has_credentials,
    )


def _failed(_: Request, error: Exception) -> Response:
    return errors.of(error).response
