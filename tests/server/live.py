"""A server on loopback over the tiny model, and clients of it."""

import contextlib
import dataclasses
import functools
import threading
import time
from collections.abc import Iterator

import openai
import uvicorn

import jspec
from jspec.api.async_llm import AsyncLLM
from jspec.server import app
from jspec.server.metrics import Observer
from jspec.server.run import Network, Protocol
from jspec.server.serving import Server, Settings
from tests import llm_fixtures

NAME = "tiny"
SPECULATIVE = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 1}


@functools.cache
def llm(root):
    target = llm_fixtures.loaded(root)["target"]
    return jspec.LLM(target, SPECULATIVE, max_num_seqs=3, max_model_len=192)


@dataclasses.dataclass
class Live:
    url: str
    server: Server

    def wait_until_idle(self):
        """Wait until nothing runs and no page is held; fail after a minute."""
        served, table = self.server.served, self.server.llm.runtime.pools[0].blocks
        until = time.monotonic() + 60
        while (served.num_running or table.num_used) and time.monotonic() < until:
            time.sleep(0.01)
        assert (served.num_running, table.num_used) == (0, 0)

    def client(self, **options):
        return openai.OpenAI(base_url=f"{self.url}/v1", **({"api_key": "-"} | options))

    def async_client(self, **options):
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", **({"api_key": "-"} | options))


@contextlib.contextmanager
def running(
    llm, *, max_num_queued=None, limits=None, record=None, network=None, **settings
) -> Iterator[Live]:
    """Run a server in a thread until the block ends."""
    network = network or Network(port=0)
    observer = Observer(llm, NAME, record)
    options = dict(max_num_queued=max_num_queued, on_launch=observer.see_launch)
    with AsyncLLM(llm, **options) as served:
        observer.attach(served)
        server = Server(served, Settings((NAME,), **settings), observer)
        api = app.create(server, **(limits or {}))
        options = dict(log_config=None, access_log=False, http=Protocol, **network.of_tls)
        bound, runner = network.bound(), uvicorn.Server(uvicorn.Config(api, **options))
        thread = threading.Thread(target=runner.run, args=([bound],), daemon=True)
        scheme = "https" if network.of_tls else "http"
        thread.start()
        while not runner.started:
            assert thread.is_alive()
        try:
            yield Live(f"{scheme}://127.0.0.1:{bound.getsockname()[1]}", server)
        finally:
            runner.should_exit = True
            thread.join(30)
