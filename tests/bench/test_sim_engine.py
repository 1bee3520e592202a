"""The simulated engine: its times by hand, and that skipping what is certain changes nothing."""

from hypothesis import given, settings
from hypothesis import strategies as st
from sim_engines import Log, by_size, make_request, make_spec

from jaxllm.bench.sim.engine import SimEngine

ARRIVALS = st.lists(
    st.tuples(
        st.sampled_from([0, 0, 0, 1, 2, 3, 8, 40]),  # halves of a second after the one before it
        st.integers(1, 60),
        st.integers(1, 40),
        st.integers(0, 2),
        st.integers(0, 40),
        st.integers(0, 2),
    ),
    min_size=1,
    max_size=40,
)
SPECS = st.fixed_dictionaries(
    {
        "num_blocks": st.sampled_from([27, 27, 33, 45, 300]),
        "block_size": st.sampled_from([4, 8]),
        "windows": st.sampled_from([(None,), (None,), (8,), (None, 8)]),
        "enable_prefix_caching": st.booleans(),
        "watermark": st.sampled_from([0.0, 0.0, 0.1]),
        "max_num_seqs": st.sampled_from([2, 5, 16]),
        "max_num_batched_tokens": st.sampled_from([16, 33, 128]),
        "max_model_len": st.just(100),
        "async_scheduling": st.booleans(),
        "policy": st.sampled_from(["fcfs", "priority"]),
        "long_prefill_token_threshold": st.sampled_from([0, 0, 7]),
        "full_sequence_must_fit": st.booleans(),
        "host_time": st.sampled_from([0.0, 0.125]),
    }
)


def run(spec, arrivals, stops, fast):
    """Everything that can be seen of a run, and the free blocks in order at its end."""
    log = Log()
    engine = SimEngine(spec, by_size, log, fast=fast)
    time = 0.0
    for index, (gap, prompt_len, output_len, prefix, prefix_len, priority) in enumerate(arrivals):
        time += gap / 2
        engine.add(time, make_request(engine, index, prompt_len, output_len, prefix, prefix_len, time, priority))
    seen = []
    for stop in [*stops, float("inf")]:
        engine.run_until(stop)
        seen.append((engine.now, engine.waiting, engine.running, engine.num_steps))
    engine.scheduler.check_integrity()
    blocks = [(block.block_id, block.block_hash) for block in engine.scheduler.kv_cache_manager.block_pool.free_queue.get_all()]
    return seen, log.done, log.gaps, engine.scheduler.make_stats(), blocks, engine.busy_time


@settings(max_examples=300, deadline=None)
@given(SPECS, ARRIVALS, st.lists(st.integers(1, 200), max_size=4).map(sorted))
def test_parking_changes_nothing(fields, arrivals, stops):
    if fields["num_blocks"] * fields["block_size"] < 108 * len(fields["windows"]) + fields["block_size"]:
        fields = {**fields, "num_blocks": 58}
    spec = make_spec(**fields)
    assert run(spec, arrivals, stops, True) == run(spec, arrivals, stops, False)
