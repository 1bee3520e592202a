import pytest

from jaxllm.bench.report import serving_table
from jaxllm.bench.server_metrics import difference, engine_result, parse_counters, prefix_cache_result, spec_decode_result

BEFORE = """\
# HELP vllm:spec_decode_num_drafts_total Drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 10.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 5.0
vllm:spec_decode_num_draft_tokens_total{engine="0"} 30
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 12
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 8
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 4
process_cpu_seconds_total 3
"""
AFTER = """\
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 14.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 5.0
vllm:spec_decode_num_draft_tokens_total{engine="0"} 40
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 18
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 11
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 7
"""


def test_counters_are_summed_over_engines() -> None:
    counters = parse_counters(BEFORE)
    assert counters["spec_decode_num_drafts"] == 15
    assert counters["spec_decode_num_accepted_tokens_per_pos:1"] == 4
    assert "process_cpu_seconds" not in counters


def test_acceptance_of_a_run() -> None:
    assert spec_decode_result(difference(BEFORE, AFTER)) == {
        "spec_decode_acceptance_rate": pytest.approx(60.0),  # 6 of 10
        "spec_decode_acceptance_length": pytest.approx(2.5),  # 1 + 6 / 4
        "spec_decode_num_drafts": 4,
        "spec_decode_draft_tokens": 10,
        "spec_decode_accepted_tokens": 6,
        "spec_decode_per_position_acceptance_rates": [0.75, 0.75],
    }


def test_hits_of_a_run() -> None:
    before = "jaxllm:prefix_cache_queries_total 8\njaxllm:prefix_cache_hits_total 8\n"
    after = "jaxllm:prefix_cache_queries_total 18\njaxllm:prefix_cache_hits_total 9\n"
    assert prefix_cache_result(difference(before, after)) == {"prefix_cache_hit_rate": pytest.approx(10.0)}


def test_servers_that_do_not_say() -> None:
    assert difference(None, AFTER) == difference(BEFORE, None) == {}
    assert spec_decode_result(difference(BEFORE, BEFORE)) == {}
    assert prefix_cache_result({}) == {}


def test_how_engines_shared_the_run() -> None:
    def page(*tokens: int) -> str:
        lines = [f'jaxllm:prompt_tokens_total{{model_name="m",engine="{i}"}} {count}.0' for i, count in enumerate(tokens)]
        return "\n".join([*lines, 'jaxllm:generation_tokens_total{engine="1",model_name="m"} 5', "process_cpu_seconds_total 3"])

    assert engine_result(page(10, 20), page(110, 100)) == {"engine_tokens": [100, 80], "engine_imbalance": 20.0}
    # One that came meanwhile, none that was ever counted, nothing to share, one engine.
    assert engine_result(page(10, 20), page(20, 20, 5))["engine_tokens"] == [10, 0, 5]
    assert engine_result(None, page(1, 2)) == engine_result(page(1, 2), None) == engine_result(page(1, 2), page(1, 2)) == {}
    assert engine_result('vllm:prompt_tokens_total{engine="0"} 1', 'vllm:prompt_tokens_total{engine="0"} 3') == {}


def test_engines_have_rows_of_their_own() -> None:
    table = serving_table({"completed": 3, "engine_tokens": [100, 80], "engine_imbalance": 20.0}, [99])
    assert [" ".join(line.split()) for line in table.splitlines()[2:-1]] == [
        "---------------------Engines----------------------",
        "Tokens of engine 0: 100",
        "Tokens of engine 1: 80",
        "Less than the busiest (%): 20.00",
    ]
