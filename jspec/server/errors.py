"""Errors of the API, in the form of OpenAI's."""

import contextlib
import dataclasses
import logging
import queue
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from jspec.api.sampling_params import SamplingParams

_log = logging.getLogger(__name__)
_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "RequestTooLargeError",
    422: "UnprocessableEntityError",
    429: "RateLimitError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
    504: "GatewayTimeoutError",
}
_NAMES = {field.name for field in dataclasses.fields(SamplingParams)} | {"prompt"}
_INTERNAL = "the server failed for this request; its log has the reason beside the request's id."


class RequestError(Exception):
    """An error that a client gets.

    Args:
      message: cause and remedy.
      status: of HTTP.
      param: name of the field of the request.
    """

    def __init__(self, message: str, *, status: int = 400, param: str | None = None):
        super().__init__(message)
        self.status, self.param = status, param

    @property
    def body(self) -> dict[str, Any]:
        """The error as OpenAI's JSON."""
        kind = _TYPES.get(self.status, _TYPES[400 if self.status < 500 else 500])
        error = dict(message=str(self), type=kind, param=self.param, code=self.status)
        return {"error": error}

    @property
    def response(self) -> JSONResponse:
        """The response of a request that failed before its answer began."""
        headers = {"Retry-After": "1"} if self.status in (429, 503) else None
        return JSONResponse(self.body, self.status, headers)


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """Turn the errors of ``AsyncLLM`` and ``SamplingParams`` into those of clients."""
    try:
        yield
    except ValueError as error:
        name = re.match(r"(?:Requested )?(\w*)", str(error))[1]
        raise RequestError(str(error), param=name if name in _NAMES else None) from None
    except queue.Full as error:
        raise RequestError(str(error), status=429) from None


def of(error: Exception) -> RequestError:
    """Return the error that a client gets; an unexpected one is logged, and its text is not sent.

    ``MemoryError`` is the engine's own, for a text that the KV cache cannot hold.
    """
    if isinstance(error, RequestError):
        return error
    if isinstance(error, TimeoutError):
        message = "the request took longer than the server permits; ask for less."
        return RequestError(message, status=504)
    if isinstance(error, MemoryError):
        return RequestError(str(error), status=503)
    _log.error("request failed", exc_info=error)
    return RequestError(_INTERNAL, status=500)


def install(app: FastAPI) -> None:
    """Have all errors of an app answered in OpenAI's form."""

    @app.exception_handler(RequestValidationError)
    async def not_valid(_: Request, error: RequestValidationError) -> JSONResponse:
        return of_fields(error.errors()).response

    @app.exception_handler(HTTPException)
    async def refused(_: Request, error: HTTPException) -> JSONResponse:
        cause = error.__cause__
        if isinstance(cause, RequestError):
            return cause.response
        message = str(cause) if isinstance(cause, ValueError) else str(error.detail)
        return RequestError(message, status=error.status_code).response

    @app.exception_handler(RequestError)
    async def of_client(_: Request, error: RequestError) -> JSONResponse:
        return error.response

    @app.exception_handler(Exception)
    async def unexpected(_: Request, error: Exception) -> JSONResponse:
        return of(error).response


def of_fields(wrong: Sequence[Mapping[str, Any]]) -> RequestError:
    """Return the error of pydantic's ``errors()``: it names the first field that is wrong.

    A field of several types is wrong for each of them.
    """
    paths = [[str(part) for part in each["loc"] if part != "body"] for each in wrong]
    if not paths[0]:
        return RequestError("the body must be a JSON object, sent as application/json.")
    name = paths[0][0]
    both = zip(paths, wrong, strict=True)
    reasons = dict.fromkeys(each["msg"] for path, each in both if path and path[0] == name)
    return RequestError(f"{name}: {'; or '.join(reasons)}.", param=name)
