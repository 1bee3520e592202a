"""What /metrics counts, exactly, and the dashboard that shows it."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from toy_engine import expected_tokens
from toy_server import ServerThread

from jaxllm.engine.metrics import METRIC_PREFIX, Counter, Gauge, Histogram
from jaxllm.serve.metrics import StatsLogger, render

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana.json"


@pytest.fixture
def fresh() -> Iterator[tuple[ServerThread, httpx.Client]]:
    server = ServerThread(config={"prefix_caching": False}, vllm_metric_names=True, served_model_name=('to"y',))
    with httpx.Client(base_url=server.url, timeout=30) as client:
        yield server, client
    assert server.stop() == 0


def samples(client: httpx.Client) -> dict[str, float]:
    """Value by name, and by name and the label that tells samples of one name apart."""
    response = client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if name not in ("model_name", "engine")}
            assert (sample.labels["model_name"], sample.labels["engine"]) == ('to"y', "0")
            key = sample.name + "".join(f" {value}" for value in labels.values())
            assert key not in found
            found[key] = sample.value
    return found


@pytest.mark.parametrize("stream", [False, True])
def test_counts(fresh: tuple[ServerThread, httpx.Client], stream: bool):
    """n requests with prompts of P and outputs of M tokens, one after the other."""
    _, client = fresh
    n, prompt_len, num_tokens = 3, 9, 5
    for i in range(n):
        body = {"prompt": list(range(70 + i, 70 + i + prompt_len)), "max_tokens": num_tokens, "stream": stream}
        assert client.post("/v1/completions", json=body).status_code == 200
    found = samples(client)
    expected = {
        "prompt_tokens_total": n * prompt_len,
        "generation_tokens_total": n * num_tokens,
        "request_success_total length": n,
        "request_success_total stop": 0,
        "request_success_total abort": 0,
        "time_to_first_token_seconds_count": n,
        "inter_token_latency_seconds_count": n * (num_tokens - 1),
        "iteration_tokens_total_sum": n * (prompt_len + num_tokens),
        "iteration_tokens_total_count": n * num_tokens,
        "e2e_request_latency_seconds_count": n,
        "request_prompt_tokens_sum": n * prompt_len,
        "request_generation_tokens_sum": n * num_tokens,
        "request_params_max_tokens_sum": n * num_tokens,
        "request_params_n_sum": n,
        "request_max_num_generation_tokens_sum": n * num_tokens,
        "num_preemptions_total": 0,
        "num_requests_running": 0,
        "num_requests_waiting": 0,
        "kv_cache_usage_perc": 0,
        "server_load": 1,
    }
    for name, value in expected.items():
        assert found[f"vllm:{name}"] == value, name
    assert found["vllm:http_requests_total POST /v1/completions 200"] == n
    # Buckets are cumulative, and the last is the count.
    buckets = [value for name, value in found.items() if name.startswith("vllm:request_prompt_tokens_bucket ")]
    assert buckets == sorted(buckets)
    assert buckets[-1] == n
    assert found["vllm:request_prompt_tokens_bucket 5.0"] == 0
    assert found["vllm:request_prompt_tokens_bucket 10.0"] == n


def test_other_ends_are_counted_too(fresh: tuple[ServerThread, httpx.Client]):
    _, client = fresh
    prompt = [70, 71, 72]
    stop = expected_tokens(prompt, 3)[2]
    client.post("/v1/completions", json={"prompt": prompt, "stop_token_ids": [stop], "n": 2})
    client.post("/v1/completions", json={"prompt": prompt, "temperature": -1})
    client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "SAY[Hi]YAS"}]})
    client.get("/nothing/at/all")
    found = samples(client)
    assert found["vllm:request_success_total stop"] == 3
    assert found["vllm:request_params_n_sum"] == 3
    assert found["vllm:http_requests_total POST /v1/completions 400"] == 1
    assert found["vllm:http_requests_total GET other 404"] == 1


def test_text_format():
    histogram = Histogram(METRIC_PREFIX + "h", "A \\ and\na line.", [0.5, 1.0])
    histogram.observe([0.5, 0.7, 3.0])
    metrics = [
        Counter(METRIC_PREFIX + "c", "Counts.", 2, {"reason": 'a"b\\\n'}),
        Counter(METRIC_PREFIX + "c", "Counts.", 3, {"reason": "z"}),
        Gauge(METRIC_PREFIX + "g", "A gauge.", 0.25),
        histogram,
    ]
    assert render(metrics, {"model_name": "m"}) == (
        "# HELP jaxllm:c_total Counts.\n# TYPE jaxllm:c_total counter\n"
        'jaxllm:c_total{model_name="m",reason="a\\"b\\\\\\n"} 2.0\njaxllm:c_total{model_name="m",reason="z"} 3.0\n'
        '# HELP jaxllm:g A gauge.\n# TYPE jaxllm:g gauge\njaxllm:g{model_name="m"} 0.25\n'
        "# HELP jaxllm:h A \\\\ and\\na line.\n# TYPE jaxllm:h histogram\n"
        'jaxllm:h_bucket{model_name="m",le="0.5"} 1.0\njaxllm:h_bucket{model_name="m",le="1.0"} 2.0\n'
        'jaxllm:h_bucket{model_name="m",le="+Inf"} 3.0\njaxllm:h_sum{model_name="m"} 4.2\njaxllm:h_count{model_name="m"} 3.0\n'
    )
    assert "vllm:g{" in render(metrics, {}, "vllm:")


def test_log_line(fresh: tuple[ServerThread, httpx.Client]):
    server, client = fresh
    stats = StatsLogger(server.context)
    assert stats.line() is None
    client.post("/v1/completions", json={"prompt": [70] * 8, "max_tokens": 4})
    stats.last_time -= 1.0
    line = stats.line()
    assert line is not None
    rates = re.fullmatch(
        r"running 0, waiting 0, KV cache 0\.0% in use, prompt ([\d.]+) tokens/s, generation ([\d.]+) tokens/s, "
        r"prefix cache hits 0\.0%, padding 0\.0%",
        line,
    )
    assert rates is not None, line
    assert 0 < float(rates[2]) <= 4.0
    assert float(rates[1]) == pytest.approx(2 * float(rates[2]), abs=0.2)
    # One line says that nothing happens any more, then there is silence.
    assert stats.line() is not None
    assert stats.line() is None


def test_without_statistics():
    server = ServerThread(config={"log_stats": False})
    try:
        page = httpx.get(server.url + "/metrics").text
        assert "jaxllm:server_load" in page
        assert "generation_tokens" not in page
    finally:
        assert server.stop() == 0


def test_every_metric_of_the_dashboard_exists(client: httpx.Client):
    client.post("/v1/completions", json={"prompt": [70], "max_tokens": 2})
    page = client.get("/metrics").text
    shown = set(re.findall(r"jaxllm:\w+", DASHBOARD.read_text()))
    assert len(shown) > 15
    for name in shown:
        assert re.search(rf"^{name}\{{", page, re.MULTILINE), name
    assert {"jaxllm:step_time_seconds_total", "jaxllm:compiles_after_warm_up_total"} <= shown
    dashboard = json.loads(DASHBOARD.read_text())
    assert dashboard["panels"]
    assert all(panel["targets"] for panel in dashboard["panels"])
