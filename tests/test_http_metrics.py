"""Metrics under vLLM's names: there from the start, and moving by what was served."""

from __future__ import annotations

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

HISTOGRAMS = [
    "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:time_per_output_token_seconds",
    "vllm:request_time_per_output_token_seconds",
    "vllm:e2e_request_latency_seconds",
    "vllm:request_prompt_tokens",
    "vllm:request_generation_tokens",
    "vllm:request_params_max_tokens",
    "vllm:request_params_n",
]
GAUGES = [
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:cache_config_info",
]
COUNTERS = [
    "vllm:prefix_cache_queries",
    "vllm:prefix_cache_hits",
    "vllm:num_preemptions",
    "vllm:prompt_tokens",
    "vllm:generation_tokens",
    "vllm:request_success",
]


@pytest.fixture(scope="module")
def http(server):
    with httpx.Client(base_url=server.url, timeout=120) as client:
        yield client


class Scrape:
    def __init__(self, http: httpx.Client) -> None:
        response = http.get("/metrics")
        assert response.headers["content-type"].startswith("text/plain")
        self.families = {family.name: family for family in text_string_to_metric_families(response.text)}

    def value(self, sample_name: str, **labels: str) -> float:
        return sum(
            sample.value
            for family in self.families.values()
            for sample in family.samples
            if sample.name == sample_name and labels.items() <= sample.labels.items()
        )


def complete(http: httpx.Client, **body: object) -> dict:
    response = http.post("/v1/completions", json={"temperature": 0, "ignore_eos": True, **body})
    assert response.status_code == 200, response.text
    return response.json()


def test_every_name_is_there(http):
    complete(http, prompt="Hello", max_tokens=2)
    families = Scrape(http).families
    assert all(families[name].type == "histogram" for name in HISTOGRAMS)
    assert all(families[name].type == "gauge" for name in GAUGES)
    assert all(families[name].type == "counter" for name in COUNTERS)


def test_samples_carry_the_name_of_the_model(http):
    model = http.get("/v1/models").json()["data"][0]["id"]
    complete(http, prompt="Hello", max_tokens=2)
    for family in Scrape(http).families.values():
        if family.name.startswith("vllm:"):
            assert {sample.labels["model_name"] for sample in family.samples} <= {model}


def test_a_request_is_counted_once_in_everything(http):
    before = Scrape(http)
    usage = complete(http, prompt="The mill by the sea", max_tokens=7)["usage"]
    after = Scrape(http)

    def grew(name: str, **labels: str) -> float:
        return after.value(name, **labels) - before.value(name, **labels)

    assert grew("vllm:request_success_total", finished_reason="length") == 1
    assert grew("vllm:generation_tokens_total") == 7
    assert grew("vllm:request_prompt_tokens_sum") == usage["prompt_tokens"]
    assert grew("vllm:request_generation_tokens_sum") == 7
    assert grew("vllm:request_params_max_tokens_sum") == 7
    assert grew("vllm:time_to_first_token_seconds_count") == 1
    assert grew("vllm:e2e_request_latency_seconds_count") == 1
    assert 1 <= grew("vllm:inter_token_latency_seconds_count") <= 6
    assert grew("vllm:time_per_output_token_seconds_count") == grew("vllm:inter_token_latency_seconds_count")
    assert grew("vllm:e2e_request_latency_seconds_sum") >= grew("vllm:time_to_first_token_seconds_sum") > 0


def test_prefix_hits_are_counted(http):
    prompt = "A prompt that is long enough to fill several blocks of the cache. " * 10
    complete(http, prompt=prompt, max_tokens=1)
    before = Scrape(http)
    usage = complete(http, prompt=prompt, max_tokens=1)["usage"]
    after = Scrape(http)
    hits = after.value("vllm:prefix_cache_hits_total") - before.value("vllm:prefix_cache_hits_total")
    assert hits == usage["prompt_tokens_details"]["cached_tokens"] > 0


def test_an_idle_server_says_so(http):
    scrape = Scrape(http)
    assert scrape.value("vllm:num_requests_running") == 0
    assert scrape.value("vllm:num_requests_waiting") == 0


def test_http_requests_are_counted_by_route_not_by_path(http):
    before = Scrape(http)
    for path in ("/v1/models/one", "/v1/models/two", "/nowhere/1", "/nowhere/2"):
        assert http.get(path).status_code == 404
    after = Scrape(http)
    for route in ("/v1/models/{model_id:path}", "other"):
        labels = {"method": "GET", "route": route, "status": "404"}
        name = "tidemill:http_requests_total"
        assert after.value(name, **labels) - before.value(name, **labels) == 2
