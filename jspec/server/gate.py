"""The gate of the API: keys, limits, ids, the log, and the end of connections."""

import asyncio
import contextvars
import hmac
import logging
import re
import uuid
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jspec.server.errors import RequestError
from jspec.server.serving import Server, body_size
from jspec.util import limits

_log = logging.getLogger("jspec.server.access")
_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)
_OPEN = frozenset({"/health", "/ping", "/version", "/metrics", "/load"})  # without a key
_TRACE = "traceparent", "tracestate"  # the W3C's headers of spans
_WHILE_DRAINING = frozenset({"/metrics", "/version", "/load"})

trace_headers: contextvars.ContextVar[dict[str, str]] = contextvars.ContextVar("trace_headers")
request_id: contextvars.ContextVar[str] = contextvars.ContextVar("request_id", default="-")


class Gate:
    """ASGI middleware around the API.

    A client that leaves cancels its request. The body is read before the API sees the request, so
    a slow client occupies a connection and nothing else.

    Args:
      app: the API.
      server: its requests are refused while it drains.
      api_keys: any of which a client must send; none for no keys.
      max_body_bytes: largest body.
      body_seconds: longest time in which a client may send its body.
      wrap: puts middleware around all of it, refusals included.
    """

    def __init__(
        self,
        app: ASGIApp,
        server: Server,
        *,
        api_keys: Sequence[str] = (),
        max_body_bytes: int = limits.BODY_BYTES.most,
        body_seconds: float = 30.0,
        wrap: Callable[[ASGIApp], ASGIApp] = lambda app: app,
    ):
        self._app, self.server = app, server
        self._wrapped = wrap(self._answer)
        self._keys = [key.encode() for key in api_keys]
        self._max_body_bytes, self._body_seconds = max_body_bytes, body_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request through the middleware, and on or to an error."""
        scope["app"] = self._app
        await self._wrapped(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        id = given if _ID.fullmatch(given) else uuid.uuid4().hex
        request_id.set(id)
        trace_headers.set(
            {name: headers.get(name.encode(), b"").decode("latin-1") for name in _TRACE}
        )
        reply = _Reply(send, id)
        begin = perf_counter()
        try:
            self._check(scope["path"], headers)
            async with asyncio.timeout(self._body_seconds):
                body = await self._body(headers, receive)
        except RequestError as error:
            await error.response(scope, receive, reply)
        except TimeoutError:
            error = RequestError("the body did not come in time.", status=408)
            await error.response(scope, receive, reply)
        except _Left:
            pass
        else:
            body_size.set(len(body))
            await _run(self._app, scope, body, receive, reply)
        finally:
            route = getattr(scope.get("route"), "path", "-")
            facts = dict(method=scope["method"], route=route, status=reply.status)
            _log.info("request", extra={"facts": facts | {"seconds": perf_counter() - begin}})

    def _check(self, path: str, headers: dict[bytes, bytes]) -> None:
        """Raise RequestError without a valid key, or while the server drains."""
        if self.server.is_draining and path not in _WHILE_DRAINING:
            raise RequestError("the server is shutting down; send it to another.", status=503)
        if not self._keys or path in _OPEN:
            return
        kind, _, key = headers.get(b"authorization", b"").partition(b" ")
        known = [hmac.compare_digest(key.strip(), each) for each in self._keys]  # all of them
        if kind.lower() != b"bearer" or not any(known):
            raise RequestError("send a valid key: Authorization: Bearer KEY.", status=401)

    async def _body(self, headers: dict[bytes, bytes], receive: Receive) -> bytes:
        most = self._max_body_bytes
        too_large = RequestError(f"the body is larger than {most} bytes.", status=413)
        if int(headers.get(b"content-length", b"0")) > most:
            raise too_large
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise _Left
            body += message.get("body", b"")
            if len(body) > most:
                raise too_large
            if not message.get("more_body"):
                return bytes(body)


class _Left(Exception):
    """The client left before its body was whole."""


class _Reply:
    """A ``send`` that adds the request's id, and records how far the response is."""

    def __init__(self, send: Send, id: str):
        self._send, self._id = send, id
        self.status, self.is_complete = 0, False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = [*message.get("headers", ()), (b"x-request-id", self._id.encode())]
            message = {**message, "headers": headers}
        elif message["type"] == "http.response.body" and not message.get("more_body"):
            self.is_complete = True
        await self._send(message)


async def _run(app: ASGIApp, scope: Scope, body: bytes, receive: Receive, reply: _Reply) -> None:
    """Run the API for a request; cancel it if the client leaves before the response is complete."""
    messages: list[dict[str, Any]] = [{"type": "http.request", "body": body}]
    has_left = asyncio.Event()

    async def received() -> Message:
        if messages:
            return messages.pop()
        await has_left.wait()
        return {"type": "http.disconnect"}

    async def left() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        has_left.set()

    answering = asyncio.ensure_future(app(scope, received, reply))
    leaving = asyncio.ensure_future(left())
    try:
        await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not (answering.done() or reply.is_complete):
            answering.cancel()
        await asyncio.wait({answering})
        if not answering.cancelled():
            answering.result()
    finally:
        answering.cancel()
        leaving.cancel()
