"""Prometheus metrics: vLLM's, with their names, types and labels, and those of jspec."""

import time
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from jspec.api import metrics
from jspec.api.async_llm import AsyncLLM, RunningRequest
from jspec.api.llm import LLM
from jspec.api.outputs import RequestOutput
from jspec.engine.launches import Launch

# Upper ends of the buckets, those of vLLM.
_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5)
_FIRST_TOKEN += (10, 20, 40, 80, 160, 640, 2560)
_BETWEEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
_BETWEEN += (20, 40, 80)
_REQUEST = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_REQUEST += (1920, 7680)
_ITERATION = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_ROUNDS = (1, 2, 4, 8, 16, 32)
_SECONDS = {
    "vllm:time_to_first_token_seconds": ("Seconds until the first token.", _FIRST_TOKEN),
    "vllm:inter_token_latency_seconds": ("Seconds between two readings of a text.", _BETWEEN),
    "vllm:request_time_per_output_token_seconds": ("Mean seconds of a token.", _BETWEEN),
    "vllm:e2e_request_latency_seconds": ("Seconds of a request.", _REQUEST),
    "vllm:request_queue_time_seconds": ("Seconds in the queue.", _REQUEST),
    "vllm:request_prefill_time_seconds": ("Seconds from the queue to a token.", _REQUEST),
    "vllm:request_decode_time_seconds": ("Seconds from the first token to the last.", _REQUEST),
    "vllm:request_inference_time_seconds": ("Seconds from the queue to the end.", _REQUEST),
}

_SPAN_NAMES = {
    "vllm:request_queue_time_seconds": "gen_ai.latency.time_in_queue",
    "vllm:time_to_first_token_seconds": "gen_ai.latency.time_to_first_token",
    "vllm:e2e_request_latency_seconds": "gen_ai.latency.e2e",
    "vllm:request_prefill_time_seconds": "gen_ai.latency.time_in_model_prefill",
    "vllm:request_decode_time_seconds": "gen_ai.latency.time_in_model_decode",
}


class Observer(Collector):
    """Watches requests and launches, and collects the counts of an ``LLM``.

    Args:
      llm: whose requests are counted.
      model_name: the label ``model_name``.
      record: exports a span for each request, as ``traces.Tracer.record``; None for none.
    """

    def __init__(
        self, llm: LLM, model_name: str, record: Callable[[int, int, dict], None] | None = None
    ):
        self._llm, self._served, self.record = llm, None, record
        self.model_name = model_name
        self._labels = {"model_name": model_name, "engine": "0"}
        self.registry = prometheus_client.CollectorRegistry()
        self._histograms = {
            name: self._histogram(name, *rest).labels(**self._labels)
            for name, rest in (_SECONDS | self._of_tokens(llm.max_model_len)).items()
        }
        self._success = prometheus_client.Counter(
            "vllm:request_success",
            "Requests that ended.",
            [*self._labels, "finished_reason"],
            registry=self.registry,
        )
        self._proposed = self._counter("proposed_draft_tokens", "Drafted tokens before the budget.")
        self._verified = self._counter("verified_draft_tokens", "Drafted tokens that it verified.")
        self._passed = self._counter("passed_nodes", "Nodes in matmuls of the target.")
        self.registry.register(self)

    def attach(self, served: AsyncLLM) -> None:
        """Collect the numbers of requests that run and wait too."""
        self._served = served

    def begin(self, running: RunningRequest, arrival: float) -> "Watch":
        """Watch a request that came at ``arrival``, of ``time.perf_counter``."""
        return Watch(self, running, arrival)

    def see_launch(self, ran: Launch) -> None:
        """Count a launch, as ``AsyncLLM``'s ``on_launch``."""
        rounds = int(ran.rounds)
        self.observe("vllm:iteration_tokens_total", int((ran.length - ran.start).sum()))
        self.observe("jspec:rounds_per_launch", rounds)
        self._proposed.inc(int(ran.proposed[:rounds].clip(0).sum()))
        self._verified.inc(int(ran.drafted[:rounds].clip(0).sum()))
        self._passed.inc(int(ran.passed.sum()))

    def observe(self, name: str, value: float) -> None:
        """Add a value to a histogram."""
        self._histograms[name].observe(value)

    def count_end(self, reason: str) -> None:
        """Count a text that ended."""
        self._success.labels(**self._labels, finished_reason=reason).inc()

    def text(self) -> bytes:
        """Return all metrics in the text format of Prometheus."""
        return prometheus_client.generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """Yield what is counted elsewhere, as the registry asks for it."""
        entries = {entry.name: entry for entry in self._llm.get_metrics()}
        for entry in entries.values():
            yield self._family(entry)
        accepted = entries["vllm:spec_decode_num_accepted_tokens"].value
        drafts = entries["vllm:spec_decode_num_drafts"].value
        length = 1 + accepted / drafts if drafts else 1.0
        yield self._gauge("jspec:acceptance_length", "Mean tokens of a round with a draft.", length)
        served = self._served
        counts = (0, 0) if served is None else (served.num_in_slots, served.num_waiting)
        names = ("running", "Sequences that run."), ("waiting", "Sequences in the queue.")
        for (name, help), count in zip(names, counts, strict=True):
            yield self._gauge(f"vllm:num_requests_{name}", help, count)
        yield from self._of_pages()

    def _of_pages(self) -> Iterator[Metric]:
        blocks = [pool.blocks for pool in self._llm.runtime.pools]
        if not blocks:
            return
        used, free = sum(each.num_used for each in blocks), sum(each.num_free for each in blocks)
        yield self._gauge("jspec:pages_used", "Pages that sequences hold.", used)
        yield self._gauge("jspec:pages_free", "Pages that none holds.", free)
        count = sum(each.kinds[0].num_pages - 1 for each in blocks)
        config = {"block_size": blocks[0].size, "num_gpu_blocks": count}
        labels = self._labels | {name: str(value) for name, value in config.items()}
        family = GaugeMetricFamily(
            "vllm:cache_config_info", "Sizes of the KV cache.", labels=list(labels)
        )
        family.add_metric(list(labels.values()), 1)
        yield family

    def _family(self, entry: metrics.Metric) -> Metric:
        help = "See docs/serving.md."
        if isinstance(entry, metrics.Gauge):
            return self._gauge(entry.name, help, entry.value)
        if isinstance(entry, metrics.Counter):
            family = CounterMetricFamily(entry.name, help, labels=list(self._labels))
            family.add_metric(list(self._labels.values()), entry.value)
            return family
        labels = [*self._labels, "position"]
        family = CounterMetricFamily(entry.name, help, labels=labels)
        for position, value in enumerate(entry.values):
            family.add_metric([*self._labels.values(), str(position)], value)
        return family

    def _gauge(self, name: str, help: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, help, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _histogram(self, name: str, help: str, buckets: tuple) -> prometheus_client.Histogram:
        return prometheus_client.Histogram(
            name, help, list(self._labels), buckets=buckets, registry=self.registry
        )

    def _counter(self, name: str, help: str) -> prometheus_client.Counter:
        counter = prometheus_client.Counter(
            f"jspec:{name}", help, list(self._labels), registry=self.registry
        )
        return counter.labels(**self._labels)

    @staticmethod
    def _of_tokens(max_model_len: int) -> dict[str, tuple[str, tuple]]:
        steps = (base * 10**power for power in range(9) for base in (1, 2, 5))
        lengths = tuple(step for step in steps if step <= max_model_len)
        return {
            "vllm:request_prompt_tokens": ("Tokens of a prompt.", lengths),
            "vllm:request_generation_tokens": ("Tokens of a text.", lengths),
            "vllm:iteration_tokens_total": ("Tokens of a launch.", _ITERATION),
            "jspec:rounds_per_launch": ("Rounds of a launch.", _ROUNDS),
        }


class Watch:
    """The times of one request."""

    def __init__(self, observer: Observer, running: RunningRequest, arrival: float):
        self._observer, self._running = observer, running
        self._arrival = arrival
        self._begin_ns = time.time_ns() - int(1e9 * (perf_counter() - arrival))
        self._first: float | None = None  # times of its readings with tokens
        self._last: float | None = None
        self._output: RequestOutput | None = None
        self._has_ended = False

    def see(self, output: RequestOutput) -> None:
        """Note an output that was just read."""
        self._output = output
        if not any(text.token_ids for text in output.outputs):
            return
        now = perf_counter()
        if self._first is None:
            self._first = now
            self._observer.observe("vllm:time_to_first_token_seconds", now - self._arrival)
        else:
            self._observer.observe("vllm:inter_token_latency_seconds", now - self._last)
        self._last = now

    def end(self) -> None:
        """Count the request, once."""
        if self._has_ended:
            return
        self._has_ended = True
        texts = [] if self._output is None else self._output.outputs
        for text in texts:
            self._observer.count_end(text.finish_reason or "abort")
            self._observer.observe("vllm:request_generation_tokens", len(text.token_ids))
        if not texts:
            self._observer.count_end("abort")
            return
        self._observer.observe("vllm:request_prompt_tokens", len(self._output.prompt_token_ids))
        times = {}
        if self._first is not None:
            times = self._note_times(max(len(text.token_ids) for text in texts))
        if self._observer.record is not None:
            self._observer.record(self._begin_ns, time.time_ns(), self._attributes(times))

    def _attributes(self, times: dict[str, float]) -> dict[str, Any]:
        """Return the attributes of the request's span, with vLLM's names."""
        texts = self._output.outputs
        return {
            "gen_ai.request.id": self._running.id,
            "gen_ai.response.model": self._observer.model_name,
            "gen_ai.request.n": len(texts),
            "gen_ai.usage.prompt_tokens": len(self._output.prompt_token_ids),
            "gen_ai.usage.completion_tokens": sum(len(text.token_ids) for text in texts),
            **{_SPAN_NAMES[name]: value for name, value in times.items() if name in _SPAN_NAMES},
        }

    def _note_times(self, num_tokens: int) -> dict[str, float]:
        begin = self._running.request.begin or self._arrival
        decode = self._last - self._first
        seconds = {
            "vllm:e2e_request_latency_seconds": self._last - self._arrival,
            "vllm:request_queue_time_seconds": max(0.0, begin - self._arrival),
            "vllm:request_prefill_time_seconds": self._first - begin,
            "vllm:request_decode_time_seconds": decode,
            "vllm:request_inference_time_seconds": self._last - begin,
        }
        if num_tokens > 1:
            seconds["vllm:request_time_per_output_token_seconds"] = decode / (num_tokens - 1)
        for name, value in seconds.items():
            self._observer.observe(name, value)
        return seconds | {"vllm:time_to_first_token_seconds": self._first - self._arrival}
