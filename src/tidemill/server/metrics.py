"""Prometheus metrics under vLLM's names, so that its dashboards and autoscalers work unchanged.

Gauges and counters of the engine are read from its latest snapshot when they are scraped; latencies and sizes are
observed here from the deltas as they reach the HTTP side. Knows nothing about routes beyond their labels.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

if TYPE_CHECKING:
    from tidemill.engine.host import Host, ServedModel
    from tidemill.engine.messages import Delta, GenerateRequest

TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
TOKEN_BUCKETS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
REQUEST_BUCKETS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
    120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
HTTP_BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
N_BUCKETS = (1, 2, 5, 10, 20)


def one_two_five(limit: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50, ... up to `limit`."""
    steps = (digit * 10**power for power in range(12) for digit in (1, 2, 5))
    return tuple(step for step in steps if step <= limit) or (1,)


class Metrics:
    """All metrics of one app, in a registry of its own, so that two apps in a process do not collide."""

    def __init__(self, host: Host) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        lengths = one_two_five(max(model.max_model_len for model in host.models))

        def histogram(name: str, text: str, buckets: Iterable[float]) -> Histogram:
            return Histogram(name, text, ["model_name"], buckets=tuple(buckets), registry=self.registry)

        self.ttft = histogram("vllm:time_to_first_token_seconds", "Arrival to first token.", TTFT_BUCKETS)
        self.itl = histogram("vllm:inter_token_latency_seconds", "Between outputs of a sequence.", TOKEN_BUCKETS)
        self.tpot = histogram(
            "vllm:request_time_per_output_token_seconds", "Mean time per token after the first.", TOKEN_BUCKETS
        )
        self.e2e = histogram("vllm:e2e_request_latency_seconds", "Arrival to last token.", REQUEST_BUCKETS)
        self.prompt_tokens = histogram("vllm:request_prompt_tokens", "Prompt tokens per request.", lengths)
        self.generation_tokens = histogram("vllm:request_generation_tokens", "Tokens per answer.", lengths)
        self.max_tokens = histogram("vllm:request_params_max_tokens", "max_tokens as asked.", lengths)
        self.n = histogram("vllm:request_params_n", "n as asked.", N_BUCKETS)
        self.success = Counter(
            "vllm:request_success", "Finished sequences.", ["model_name", "finished_reason"], registry=self.registry
        )
        self.http_requests = Counter(
            "tidemill:http_requests", "HTTP responses.", ["method", "route", "status"], registry=self.registry
        )
        self.http_seconds = Histogram(
            "tidemill:http_request_duration_seconds",
            "HTTP request to end of response.",
            ["route"],
            buckets=HTTP_BUCKETS,
            registry=self.registry,
        )
        self.registry.register(EngineCollector(host, self))

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def watch(self, model: ServedModel, request: GenerateRequest) -> RequestWatch:
        return RequestWatch(self, model.names[0], request)


class RequestWatch:
    """The clock of one request, from arrival to the end of its last sequence."""

    def __init__(self, metrics: Metrics, model_name: str, request: GenerateRequest) -> None:
        self._metrics, self._model_name, self._request = metrics, model_name, request
        self._itl = metrics.itl.labels(model_name)
        self._arrived = time.monotonic()
        self._first: dict[int, float] = {}
        self._last: dict[int, float] = {}
        self._tokens: dict[int, int] = {}
        self._unfinished = set(range(request.params.n))

    def saw(self, delta: Delta) -> None:
        now, index = time.monotonic(), delta.index
        if delta.token_ids:
            if index in self._last:
                self._itl.observe(now - self._last[index])
            else:
                if not self._first:
                    self._metrics.ttft.labels(self._model_name).observe(now - self._arrived)
                    self._observe_request(delta.num_prompt_tokens)
                self._first[index] = now
            self._last[index] = now
            self._tokens[index] = self._tokens.get(index, 0) + len(delta.token_ids)
        if delta.finish_reason is not None:
            self._finish(index, delta.finish_reason, now)

    def ended_early(self, reason: str) -> None:
        """The client left (`abort`) or the engine failed (`error`) while sequences were running."""
        for index in list(self._unfinished):
            self._finish(index, reason, time.monotonic())

    def _observe_request(self, num_prompt_tokens: int) -> None:
        name, params = self._model_name, self._request.params
        self._metrics.prompt_tokens.labels(name).observe(num_prompt_tokens)
        self._metrics.n.labels(name).observe(params.n)
        if params.max_tokens is not None:
            self._metrics.max_tokens.labels(name).observe(params.max_tokens)

    def _finish(self, index: int, reason: str, now: float) -> None:
        self._unfinished.discard(index)
        name, tokens = self._model_name, self._tokens.get(index, 0)
        self._metrics.success.labels(name, reason).inc()
        self._metrics.e2e.labels(name).observe(now - self._arrived)
        self._metrics.generation_tokens.labels(name).observe(tokens)
        if tokens > 1:
            self._metrics.tpot.labels(name).observe((self._last[index] - self._first[index]) / (tokens - 1))


class EngineCollector:
    """Reads the engines' snapshots at scrape time; an idle server does no work for metrics."""

    GAUGES = (
        ("vllm:num_requests_running", "Sequences in the running batch.", "running"),
        ("vllm:num_requests_waiting", "Sequences waiting for their first step.", "waiting"),
        ("vllm:kv_cache_usage_perc", "Share of the KV cache in use; 1 is all of it.", "kv_usage"),
    )
    COUNTERS = (
        ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", "prefix_queries"),
        ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", "prefix_hits"),
        ("vllm:num_preemptions", "Sequences put back to the queue for lack of blocks.", "preemptions"),
        ("vllm:prompt_tokens", "Prompt tokens computed.", "prompt_tokens"),
        ("vllm:generation_tokens", "Tokens generated.", "generation_tokens"),
    )

    def __init__(self, host: Host, metrics: Metrics) -> None:
        self._host, self._metrics = host, metrics

    def collect(self) -> Iterator[Metric]:
        for name, text, attribute in self.GAUGES:
            gauge = GaugeMetricFamily(name, text, labels=["model_name"])
            for model in self._host.models:
                gauge.add_metric([model.names[0]], getattr(model.client.stats, attribute))
            yield gauge
        for name, text, attribute in self.COUNTERS:
            counter = CounterMetricFamily(name, text, labels=["model_name"])
            for model in self._host.models:
                counter.add_metric([model.names[0]], getattr(model.client.stats, attribute))
            yield counter
        yield self._cache_config()
        yield self._inter_token_latency_under_its_old_name()

    def _cache_config(self) -> Metric:
        labels = ["model_name", "block_size", "num_gpu_blocks", "enable_prefix_caching"]
        info = GaugeMetricFamily(
            "vllm:cache_config_info", "How the KV cache is set up (blocks on any device).", labels=labels
        )
        for model in self._host.models:
            config = model.client.config
            values = (config.block_size, config.num_blocks, config.enable_prefix_caching)
            info.add_metric([model.names[0], *map(str, values)], 1)
        return info

    def _inter_token_latency_under_its_old_name(self) -> Metric:
        """Copied at scrape time rather than observed twice per token."""
        old = "vllm:time_per_output_token_seconds"
        copy = HistogramMetricFamily(old, "Older name of vllm:inter_token_latency_seconds.", labels=["model_name"])
        for metric in self._metrics.itl.collect():
            for sample in metric.samples:
                name = sample.name.replace(metric.name, old)
                copy.add_sample(name, sample.labels, sample.value)
        return copy
