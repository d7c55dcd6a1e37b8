"""Run the server: bind, compile, answer, and drain at the end."""

import asyncio
import contextlib
import dataclasses
import errno
import logging
import os
import signal
import socket
import ssl
import stat
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from jspec.api.async_llm import AsyncLLM
from jspec.api.llm import LLM
from jspec.api.sampling_params import SamplingParams
from jspec.server import app, batch
from jspec.server.gate import Gate
from jspec.server.metrics import Observer
from jspec.server.middleware import Cors
from jspec.server.serving import Server, Settings
from jspec.util import limits
from jspec.util.messages import shown

_TYPICAL_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "count": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "count", "tags"],
}
_log = logging.getLogger(__name__)
_MOST_HEADER_BYTES = 64 << 10
_IDLE_SECONDS = 15  # idle time of a connection between two requests


@dataclasses.dataclass(frozen=True)
class Network:
    """The address of a server, its keys, its limits and its middleware."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0 for any free one
    uds: str | None = None  # path of a Unix socket, instead of host and port
    root_path: str = ""
    api_keys: tuple[str, ...] = ()
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    ssl_ca_certs: str | None = None
    ssl_cert_reqs: int = ssl.CERT_NONE
    cors: Cors | None = None
    middlewares: tuple[Any, ...] = ()
    has_docs: bool = True
    max_body_bytes: int = limits.BODY_BYTES.most
    drain_seconds: float = 120.0  # longest time for running requests after SIGTERM

    @property
    def of_app(self) -> dict[str, Any]:
        """Arguments of ``app.create``."""
        names = "root_path", "api_keys", "cors", "middlewares", "has_docs", "max_body_bytes"
        return {name: getattr(self, name) for name in names}

    @property
    def of_tls(self) -> dict[str, Any]:
        """Arguments of uvicorn for HTTPS; none for HTTP."""
        names = "ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_cert_reqs"
        return {name: getattr(self, name) for name in names} if self.ssl_certfile else {}

    def bound(self) -> socket.socket:
        """Return a socket at the address, before the model is loaded.

        Raises:
          ValueError: the address is taken or not ours, or a certificate cannot be read.
        """
        if self.of_tls:
            self._check_tls()
        if self.uds is not None:
            return _unix_socket(self.uds)
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        bound = socket.socket(family)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind((self.host, self.port))
        except (OSError, OverflowError) as error:
            bound.close()
            reason = getattr(error, "strerror", None) or str(error)
            raise ValueError(
                f"--host {shown(self.host)} --port {self.port}: {reason}; take another address."
            ) from None
        return bound

    def _check_tls(self) -> None:
        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self.ssl_certfile, self.ssl_keyfile)
            if self.ssl_ca_certs is not None:
                context.load_verify_locations(self.ssl_ca_certs)
        except (OSError, ValueError) as error:  # SSLError is an OSError
            raise ValueError(
                f"--ssl-certfile {self.ssl_certfile} and its keys cannot be used: {error}; check "
                "--ssl-keyfile and --ssl-ca-certs too."
            ) from None


def _unix_socket(path: str) -> socket.socket:
    """Return a Unix socket at a path; one that a process left there is replaced."""
    bound = socket.socket(socket.AF_UNIX)
    try:
        if _is_abandoned(path):
            os.unlink(path)
        bound.bind(path)
    except OSError as error:
        bound.close()
        reason = error.strerror or str(error)
        raise ValueError(f"--uds {shown(path)}: {reason}; take another path.") from None
    return bound


def _is_abandoned(path: str) -> bool:
    """Return whether a path is a Unix socket that no process listens at."""
    try:
        is_socket = stat.S_ISSOCK(os.stat(path).st_mode)
    except OSError:
        return False
    with socket.socket(socket.AF_UNIX) as probe:
        return is_socket and probe.connect_ex(path) == errno.ECONNREFUSED


def serve(
    llm: LLM,
    settings: Settings,
    network: Network,
    bound: socket.socket,
    *,
    max_num_queued: int | None = None,
    record: Callable[[int, int, dict], None] | None = None,
    on_progress: Callable[[int, int], None] = lambda *_: None,
    on_ready: Callable[[str], None] = lambda _: None,
) -> None:
    """Answer requests until SIGTERM or Ctrl-C; running requests then finish first.

    A second signal ends at once. What the first JSON schemas need compiles once the server answers.

    Args:
      llm: the loaded models.
      settings: of the API.
      network: limits, keys and certificates.
      bound: a socket of ``network.bound``.
      max_num_queued: as of ``AsyncLLM``.
      record: exports spans, as ``traces.Tracer.record``; None for none.
      on_progress: as of ``AsyncLLM.warm_up``.
      on_ready: called with the server's address once it answers.
    """
    options = dict(max_num_queued=max_num_queued, record=record, on_progress=on_progress)
    api = application(llm, settings, **options, **network.of_app)
    served = api.server.served

    def begin(url: str) -> None:
        on_ready(url)
        typical = SamplingParams(structured_outputs={"json": _TYPICAL_SCHEMA})
        served.prepare(typical).add_done_callback(tell_failure)

    def tell_failure(prepared: Future[None]) -> None:
        if api.server.is_draining or prepared.cancelled() or prepared.exception() is None:
            return
        reason = type(prepared.exception()).__name__  # its text may name files
        _log.warning("what JSON schemas need was not compiled: %s", reason)

    try:
        _Uvicorn(api, api.server, network, begin).run([bound])
    finally:
        served.close()
        if network.uds is not None:
            with contextlib.suppress(OSError):
                os.unlink(network.uds)


def application(
    llm: LLM,
    settings: Settings,
    *,
    max_num_queued: int | None = None,
    record: Callable[[int, int, dict], None] | None = None,
    on_progress: Callable[[int, int], None] = lambda *_: None,
    **options: Any,
) -> Gate:
    """Return the API of a model as an ASGI application, for servers other than ours.

    Its programs are compiled then. Its engine runs in a thread, until ``server.served.close()``.
    ``options`` are those of ``app.create``; other arguments are those of ``serve``.
    """
    observer = Observer(llm, settings.model_names[0], record)
    served = AsyncLLM(llm, max_num_queued=max_num_queued, on_launch=observer.see_launch)
    try:
        observer.attach(served)
        served.warm_up(on_progress)
        return app.create(Server(served, settings, observer), **options)
    except BaseException:
        served.close()
        raise


def answer_batch(
    llm: LLM, settings: Settings, lines: list[batch.Line], output: batch.Output, **options: Any
) -> int:
    """Answer a batch file, without a network; return the number of requests that failed.

    ``options`` are those of ``batch.run``. The output stays partial if this is interrupted.
    """
    observer = Observer(llm, settings.model_names[0])
    try:
        with AsyncLLM(llm, on_launch=observer.see_launch) as served:
            server = Server(served, settings, observer)
            together = dict(num_together=4 * llm.max_num_seqs)
            num_failed = asyncio.run(batch.run(server, lines, output, **together, **options))
    finally:
        output.close()
    output.finish()
    return num_failed


class Protocol(H11Protocol):
    """A connection that is closed if the head of its next request takes too long.

    Uvicorn's own timer ends with the first byte of a head, and waits for no first request.
    """

    seconds = _IDLE_SECONDS  # between two looks: a head may take as many, and at most twice as many

    def connection_made(self, transport: Any) -> None:
        """Begin to watch a connection."""
        super().connection_made(transport)
        self._watch(-1)

    def connection_lost(self, exc: Exception | None) -> None:
        """End watching."""
        self._next_look.cancel()
        super().connection_lost(exc)

    def _watch(self, last: Any) -> None:
        """Close the connection if it has waited since the ``last`` request that was seen."""
        is_waiting = self.cycle is None or self.cycle.response_complete
        if is_waiting and self.cycle is last:
            self.shutdown()
        else:
            seen = self.cycle if is_waiting else -1
            self._next_look = self.loop.call_later(self.seconds, self._watch, seen)


class _Uvicorn(uvicorn.Server):
    """Uvicorn that answers 503 while running requests finish, and then ends."""

    def __init__(self, api: Any, server: Server, network: Network, on_ready: Callable[[str], None]):
        config = uvicorn.Config(
            api,
            http=Protocol,  # h11, which bounds headers
            h11_max_incomplete_event_size=_MOST_HEADER_BYTES,
            timeout_keep_alive=_IDLE_SECONDS,
            access_log=False,
            log_config=None,
            server_header=False,
            **network.of_tls,
        )
        super().__init__(config)
        self._server, self._network, self._on_ready = server, network, on_ready
        self._end: float | None = None  # end of draining

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen, and say so."""
        await super().startup(sockets)
        if self.started and self._network.uds is not None:
            self._on_ready(f"unix:{self._network.uds}")
        elif self.started:
            host, port = sockets[0].getsockname()[:2]
            host = f"[{host}]" if ":" in host else host
            self._on_ready(f"{'https' if self.config.is_ssl else 'http'}://{host}:{port}")

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Begin to drain; the second time, end at once."""
        if self._server.is_draining:
            self.force_exit = sig == signal.SIGINT
            super().handle_exit(sig, frame)
            return
        self._server.is_draining = True
        self._end = time.monotonic() + self._network.drain_seconds
        _log.info("draining: running requests finish, new ones get 503")

    async def on_tick(self, counter: int) -> bool:
        """End once the drain is over."""
        if self._end is not None:
            is_late = time.monotonic() > self._end
            self.force_exit |= is_late
            # A request whose grammar still compiles is none that runs.
            has_ended = not (self._server.served.num_running or self.server_state.tasks)
            self.should_exit |= is_late or has_ended
        return await super().on_tick(counter)
