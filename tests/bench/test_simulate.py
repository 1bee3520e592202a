"""The simulator around its engines: workloads, step times, balancers, deaths, tables."""

import json
import math

import numpy as np
import pytest
from sim_engines import Log, by_size, make_request, make_spec

from jaxllm.bench.cli import main
from jaxllm.bench.measure_steps import StepSample, fit
from jaxllm.bench.sim.cluster import Kill, simulate
from jaxllm.bench.sim.engine import SimEngine
from jaxllm.bench.sim.models import MODELS, model_shape
from jaxllm.bench.sim.result import gap_summary, summarize
from jaxllm.bench.sim.step_time import DEVICES, Roofline, StepTable, kv_bytes_per_token, num_kv_blocks, num_layer_weights
from jaxllm.bench.sim.workload import Workload, load_trace, sample, write_trace
from jaxllm.core.request import Request
from jaxllm.core.types import EngineCoreRequest
from jaxllm.sampling_params import SamplingParams
from jaxllm.worker.buckets import Buckets


def one_second(num_tokens: int, num_rows: int, num_context_tokens: int, num_pairs: int) -> float:
    return 1.0


def requests(*rows: tuple[float, int, int]) -> Workload:
    """Of (time, prompt tokens, output tokens)."""
    times, prompts, outputs = (np.array(column) for column in zip(*rows, strict=True))
    return Workload(times.astype(float), prompts, outputs, np.full(len(rows), -1))


def test_times_of_a_synchronous_engine_by_hand():
    log = Log()
    engine = SimEngine(make_spec(async_scheduling=False, host_time=0.25), one_second, log)
    engine.add(10.0, make_request(engine, 0, 5, 3))
    engine.add(10.5, make_request(engine, 1, 5, 1))
    engine.run_until(math.inf)
    # Steps of 1.25 s from 10.0 on. The second request joins the second step.
    assert log.done == [(1, 12.5, 12.5, 0, 0), (0, 11.25, 13.75, 0, 0)]
    assert log.gaps == {1.25: 2}


def test_times_of_an_asynchronous_engine_by_hand():
    log = Log()
    engine = SimEngine(make_spec(), one_second, log)
    engine.add(10.0, make_request(engine, 0, 5, 4))
    engine.add(10.5, make_request(engine, 1, 5, 1))
    engine.run_until(math.inf)
    # At 10 two steps are launched, which end at 11 and 12. The third is scheduled at 11, with the second request; it ends at 13.
    assert log.done == [(1, 13.0, 13.0, 0, 0), (0, 11.0, 14.0, 0, 0)]


def test_what_a_snapshot_sees_is_what_has_happened():
    engine = SimEngine(make_spec(async_scheduling=False, max_num_seqs=1), one_second, Log())
    for index in range(3):
        engine.add(0.0, make_request(engine, index, 5, 2))
    seen = []
    for time in (0.5, 1.0, 2.5, 6.0):
        engine.run_until(time)
        seen.append((engine.waiting, engine.running))
    assert seen == [(0, 0), (2, 1), (2, 0), (0, 0)]


def test_a_light_request_is_scheduled_like_a_real_one():
    """Real tokens and SHA-256 hashes against numbers: the same hits and the same times."""

    def run(make):
        log = Log()
        engine = SimEngine(make_spec(num_blocks=60), by_size, log, fast=False)
        for index in range(12):
            request = make(engine, index)
            engine.add(index * 1.5, request)
        engine.run_until(math.inf)
        return log.done, log.gaps

    class RealTokens(Request):
        __slots__ = ("first_time", "index", "parked_at", "serial", "token_time")

    def real(engine, index):
        prompt = [*range(index % 3 * 100, index % 3 * 100 + 13), *range(1000 + index * 50, 1000 + index * 50 + index)]
        params = SamplingParams(max_tokens=5 + index, ignore_eos=True)
        request = RealTokens(EngineCoreRequest(str(index), prompt, params), engine.block_hasher)
        request.index, request.first_time, request.token_time, request.serial = index, -1.0, -1.0, 0
        return request

    def light(engine, index):
        return make_request(engine, index, 13 + index, 5 + index, index % 3, 13)

    done, gaps = run(light)
    assert (done, gaps) == run(real)
    assert any(hit > 0 for _, _, _, hit, _ in done)


def test_roofline_by_hand():
    model, device = model_shape("llama-3.1-8b"), DEVICES["h200"]
    # 32 layers of 4096 · 128 · (64 + 16) + 3 · 4096 · 14336.
    assert num_layer_weights(model) == 32 * (41_943_040 + 176_160_768) == 6_979_321_856
    assert kv_bytes_per_token(model, "bfloat16") == 128 * 1024
    roofline = Roofline(device, model, "bfloat16")
    read = (6_979_321_856 + 128256 * 4096) * 2 / (4.8e12 * 0.8)
    assert roofline(1, 1, 1000, 1000) == pytest.approx(read + 1000 * 131072 / (4.8e12 * 0.8) + 0.4e-3)
    flops = 989e12 * 0.7
    prefill = 2 * 6_979_321_856 * 2048 / flops + 128256 * 4096 * 2 / (4.8e12 * 0.8)
    attention = 4 * 32 * 32 * 128 * (2048 * 2049 // 2) / flops
    assert roofline(2048, 1, 2048, 2048 * 2049 // 2) == pytest.approx(prefill + attention + 0.4e-3)


def test_roofline_pads_to_buckets_and_shares_among_devices():
    model, device = model_shape("llama-3.1-8b"), DEVICES["h100"]
    padded = Roofline(device, model, "bfloat16", 1, Buckets(64, 2048))
    plain = Roofline(device, model, "bfloat16")
    assert padded(1100, 3, 1100, 1100) == plain(1280, 64, 1100, 1100)
    assert padded(33, 33, 9, 9) == plain(48, 48, 9, 9)
    two = Roofline(device, model, "bfloat16", 2)
    assert plain(2048, 1, 0, 0) / 2 < two(2048, 1, 0, 0) < plain(2048, 1, 0, 0)
    assert num_kv_blocks(DEVICES["h200"], model, "bfloat16", 1, 32, 0.92) == 27098
    with pytest.raises(ValueError, match="leave no room"):
        num_kv_blocks(DEVICES["h100"], model_shape("llama-3.1-70b"), "bfloat16", 1, 32, 0.9)


def test_sliding_windows_are_refused():
    hf = {**MODELS["llama-3.1-8b"], "architectures": ["MistralForCausalLM"], "sliding_window": 4096}
    model = type(model_shape("llama-3.1-8b")).from_hf(hf)
    with pytest.raises(ValueError, match="sliding windows"):
        Roofline(DEVICES["h200"], model, "bfloat16")


def test_step_table_by_hand(tmp_path):
    table = StepTable({1: (0.1, 0.0, 0.001), 4: (0.2, 0.0, 0.002)}, {16: (0.5, 0.01, 0.0)}, {"block_size": 8})
    assert table(1, 1, 10, 10) == pytest.approx(0.11)
    assert table(3, 3, 10, 10) == pytest.approx(0.22)
    assert table(8, 8, 10, 10) == pytest.approx(0.42)
    assert table(9, 2, 10, 40) == pytest.approx(0.6)
    path = tmp_path / "steps.json"
    path.write_text(json.dumps(table.to_json()))
    assert StepTable.load(str(path)) == table
    path.write_text('{"decode": {"1": [0, 0, 0]}, "mixed": {"16": [1, 0, 0]}}')
    with pytest.raises(ValueError, match="base > 0"):
        StepTable.load(str(path))
    with pytest.raises(ValueError, match="No such file"):
        StepTable.load(str(tmp_path / "none.json"))


def test_a_workload_is_what_was_asked_for_and_survives_a_trace_file(tmp_path):
    workload = sample(
        2000, 50.0, 7, input_len=100, output_len=20, ratios=(0.5, 0.25), num_prefixes=5, prefix_len=40, burstiness=1.0
    )
    assert workload.times[-1] == pytest.approx(2000 / 50)
    assert (workload.prompt_lens.min(), workload.prompt_lens.max()) == (50, 150)
    assert (workload.output_lens.min(), workload.output_lens.max()) == (15, 25)
    assert sorted(np.unique(workload.prefixes)) == [0, 1, 2, 3, 4]
    path = str(tmp_path / "trace.jsonl")
    write_trace(path, workload, 8)
    again = load_trace(path, None, 8)
    assert np.allclose(again.times, workload.times - workload.times[0])
    assert (again.prompt_lens == workload.prompt_lens).all()
    # Blocks are equal in the one where they are in the other.
    for i in range(1, 50):
        for block_size in (8, 16):
            pairs = [
                [a == b for a, b in zip(w.prompt_hashes(0, block_size), w.prompt_hashes(i, block_size), strict=False)]
                for w in (workload, again)
            ]
            assert pairs[0] == pairs[1]
            assert any(pairs[0]) == (workload.prefixes[0] == workload.prefixes[i])


def test_blocks_of_a_trace_are_equal_up_to_where_ids_differ():
    trace = Workload(
        np.zeros(2), np.array([40, 40]), np.ones(2, int), np.full(2, -1), traces=[[1, 2, 3], [1, 9, 3]], chunk_size=10
    )
    one, two = trace.prompt_hashes(0, 5), trace.prompt_hashes(1, 5)
    # Tokens 0..9 are chunk 1. After the chunk that differs nothing is equal; tokens 30..39 have no id and are nobody else's.
    assert [a == b for a, b in zip(one, two, strict=True)] == [True, True] + [False] * 6
    assert len({*one, *two}) == 14


def test_the_number_of_processes_changes_nothing():
    workload = sample(300, 40.0, 1, input_len=40, output_len=30, ratios=(0.5, 0.5), num_prefixes=3, prefix_len=8)
    spec = make_spec(max_model_len=256)

    def quick(num_tokens, num_rows, num_context_tokens, num_pairs):
        return by_size(num_tokens, num_rows, num_context_tokens, num_pairs) / 64

    kills = [Kill(1, 2.05), Kill(0, 4.0)]
    local = simulate(workload, spec, quick, num_engines=5, num_front_ends=2, kills=kills, restart_after=1.0)
    step_time = StepTable({16: (0.02, 1e-6, 0.0)}, {64: (0.05, 1e-6, 0.0)}, {})
    results = [
        simulate(workload, spec, step_time, num_engines=5, num_front_ends=2, kills=kills, num_processes=n, fast=fast)
        for n, fast in ((0, True), (2, True), (0, False))
    ]
    # Sums of the gaps are made in another order.
    figures = [
        {
            name: round(value, 6) if isinstance(value, float) else value
            for name, value in summarize(workload, result, [99]).items()
        }
        for result in results
    ]
    assert figures[0] == figures[1] == figures[2]
    assert local.groups[0].engines[4].finished > 0


def test_requests_go_where_the_balancer_sends_them():
    # Four at once: two engines take turns. By the first snapshot (0.1 s) each has two, and the fifth's turn is engine 0's.
    workload = requests(*[(0.0, 8, 2)] * 4, (0.15, 8, 2))
    result = simulate(workload, make_spec(), one_second, num_engines=2)
    assert result.engine_of.tolist() == [0, 1, 0, 1, 0]


def test_the_death_of_an_engine_by_hand():
    # One step a second, synchronous. Engine 0 has requests 0 and 2, of which it runs one at a time.
    spec = make_spec(async_scheduling=False, max_num_seqs=1)
    workload = requests((0.0, 8, 5), (0.0, 8, 5), (0.01, 8, 2), (4.0, 8, 1))
    result = simulate(workload, spec, one_second, num_engines=2, kills=[Kill(0, 2.5)])
    (death,) = result.deaths
    assert (death.failed_over, death.lost) == ([2], [0])
    assert result.engine_of.tolist() == [0, 1, 1, 1]
    figures = summarize(workload, result, [99])
    assert (figures["completed"], figures["failed"], figures["without_engine"]) == (3, 1, 0)
    # Request 1 ends at 5 s; then 2, whose first token comes at 6.
    assert result.groups[0].first_times[2] == 6.0
    assert figures["deaths"][0]["p99_ttft_of_failed_over_ms"] == pytest.approx(5990)


def test_without_an_engine_requests_fail_until_one_is_back():
    workload = requests((0.0, 8, 50), (3.0, 8, 1), (9.0, 8, 1))
    spec = make_spec(async_scheduling=False)
    gone = simulate(workload, spec, one_second, kills=[Kill(0, 2.0)])
    assert gone.lost.tolist() == [True, True, True]
    assert summarize(workload, gone, [99])["without_engine"] == 2
    back = simulate(workload, spec, one_second, kills=[Kill(0, 2.0)], restart_after=4.0)
    assert back.lost.tolist() == [True, True, False]
    assert back.groups[0].last_times[2] == 10.0


def test_figures_by_hand():
    workload = requests((0.0, 10, 3), (0.0, 20, 1))
    spec = make_spec(async_scheduling=False)
    result = simulate(workload, spec, one_second)
    figures = summarize(workload, result, [99], {"ttft": 1000, "e2el": 2000})
    assert figures["duration"] == 3.0
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (30, 4)
    assert figures["request_throughput"] == pytest.approx(2 / 3)
    # The first one takes 3 s, more than the objective.
    assert figures["request_goodput"] == pytest.approx(1 / 3)
    assert figures["mean_ttft_ms"] == figures["p99_ttft_ms"] == 1000
    assert figures["mean_tpot_ms"] == 1000
    assert figures["mean_concurrent_requests"] == pytest.approx(4 / 3)


def test_percentiles_of_gaps_are_right_to_half_a_percent():
    workload = sample(200, 1.0, 3, input_len=40, output_len=30, ratios=(0.5, 0.5))
    log = Log()
    engine = SimEngine(make_spec(), by_size, log)
    for index in range(200):
        engine.add(
            float(workload.times[index]),
            make_request(engine, index, *(int(lens[index]) for lens in (workload.prompt_lens, workload.output_lens))),
        )
    engine.run_until(math.inf)
    exact = np.repeat(list(log.gaps), list(log.gaps.values()))
    result = simulate(workload, make_spec(), by_size)
    summary = gap_summary(result, [10, 50, 90, 99])
    assert summary.mean == pytest.approx(exact.mean() * 1000)
    assert summary.std == pytest.approx(exact.std() * 1000)
    for percentile, value in summary.percentiles:
        assert value == pytest.approx(np.percentile(exact, percentile) * 1000, rel=0.006)


def test_command(tmp_path, capsys):
    out, trace = tmp_path / "out.json", tmp_path / "trace.jsonl"
    flags = "--engines 3 --requests 400 --kill 1@4 --restart-after 2 --goodput ttft:200 --seed 5 --processes 0"
    assert main(["simulate", *flags.split(), "--output-json", str(out), "--write-trace", str(trace)]) == 0
    text = capsys.readouterr().out
    for words in ("Simulated Serving Result", "P99 TTFT (ms):", "per engine", "died at (s)", "Request goodput (req/s):"):
        assert words in text
    figures = json.loads(out.read_text())
    assert figures["completed"] + figures["failed"] == 400
    assert figures["completed"] == sum(figures["requests_of_engine"])
    assert figures["deaths"][0]["lost"] > 0
    # Engines are loaded alike, but for the one that was away.
    assert abs(figures["requests_of_engine"][0] - figures["requests_of_engine"][2]) < 20
    assert main(["simulate", "--trace", str(trace), "--processes", "0"]) == 0
    assert "400" in capsys.readouterr().out


def test_command_with_measured_step_times(tmp_path, capsys):
    about = {
        "max_num_seqs": 2,
        "max_num_batched_tokens": 64,
        "max_model_len": 128,
        "block_size": 8,
        "num_gpu_blocks_override": 65,
    }
    steps, trace, out = tmp_path / "steps.json", tmp_path / "trace.jsonl", tmp_path / "out.json"
    steps.write_text(json.dumps(StepTable({2: (0.25, 0.0, 0.0)}, {64: (0.5, 0.0, 0.0)}, about).to_json()))
    trace.write_text('{"timestamp": 1.0, "input_length": 10, "output_length": 3}\n')
    flags = ["--step-table", str(steps), "--trace", str(trace), "--request-time", "0.125", "--output-json", str(out)]
    assert main(["simulate", *flags]) == 0
    assert "2 requests, 64 tokens a step, 65 blocks of 8" in capsys.readouterr().out
    figures = json.loads(out.read_text())
    assert (figures["mean_ttft_ms"], figures["mean_itl_ms"], figures["mean_e2el_ms"]) == (625, 250, 1125)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--kill 3", "--kill takes ENGINE@SECONDS, such as 3@12.5, got '3'"),
        ("--kill 1@2", "--kill takes ENGINE@SECONDS with an engine below 1"),
        ("--engines 0", "--engines must be an integer of at least 1, got 0"),
        ("--max-model-len 1000", "does not fit in --max-model-len 1000"),
        ("--num-prefixes 0", "--num-prefixes and --prefix-len go together"),
        ("--prefix-len 600", "--prefix-len 600 must be less than the shortest prompt"),
        ("--model-shape gpt5", "--model-shape must be one of llama-3.1-8b"),
        ("--model-shape llama-3.1-70b", "leave no room for a KV cache"),
        ("--trace none.jsonl", "--trace none.jsonl: No such file"),
        ("--host-time -1", "--host-time must be at least 0"),
        ("--goodput ttft", "NAME:MILLISECONDS"),
    ],
)
def test_wrong_flags(flags, message, capsys):
    assert main(["simulate", "--requests", "10", *flags.split()]) == 2
    assert message in capsys.readouterr().err


def test_the_fit_of_step_times_by_hand():
    buckets = Buckets(4, 64)
    samples = [StepSample(2, 2, c, c, 0.1 + 0.001 * c) for c in (20, 20, 400)]
    samples += [StepSample(3, 3, c, c, 0.2 + 0.001 * c) for c in (30, 600)]
    samples += [StepSample(t, 1, t, p, 0.5 + 1e-5 * p) for t, p in ((60, 1000), (60, 1000), (500, 3000))]
    samples += [StepSample(9, 2, 9, 30, 0.3)]
    decode, mixed = fit([sample for sample in samples if sample.num_tokens <= 64], buckets)
    assert decode[2] == pytest.approx((0.1, 0.001, 0.0))
    assert decode[4] == pytest.approx((0.2, 0.001, 0.0))
    # With one context only there is no slope, and it is never below 0.
    assert mixed == {16: (pytest.approx(0.3), 0.0, 0.0), 64: (pytest.approx(0.51), 0.0, 0.0)}
    falling = [StepSample(1, 1, 10, 10, 0.2), StepSample(1, 1, 200, 200, 0.1), StepSample(20, 1, 20, 210, 1.0)]
    assert fit(falling, buckets)[0] == {1: (pytest.approx(0.15), 0.0, 0.0)}
