"""EngineCore over the real scheduler and an executor that checks what it is handed."""

import random
from typing import Any

import pytest
from toy_engine import EOS, ToyExecutor, expected_tokens, hash_next, make_config, scripted

from jaxllm.core.kv_cache_interface import KVCacheConfig
from jaxllm.core.output import ModelRunnerOutput, SchedulerOutput
from jaxllm.core.types import EngineCoreRequest, FinishReason
from jaxllm.engine.core import EngineCore
from jaxllm.engine.core_client import InprocClient
from jaxllm.engine.errors import EngineDeadError
from jaxllm.sampling_params import SamplingParams


def request_of(request_id: str, prompt: list[int], max_tokens: int = 4, **params: Any) -> EngineCoreRequest:
    client_index = params.pop("client_index", 0)
    return EngineCoreRequest(
        request_id, prompt, SamplingParams(max_tokens=max_tokens, **params), eos_token_id=EOS, client_index=client_index
    )


def make_core(executor_class: type[ToyExecutor] = ToyExecutor, log_stats: bool = False, **config: Any) -> EngineCore:
    return EngineCore(make_config(**config), executor_class, log_stats)


def add(core: EngineCore, request: EngineCoreRequest) -> None:
    core.add_request(core.make_request(request))


def run(core: EngineCore) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    while core.scheduler.has_unfinished_requests():
        for outputs in core.step().values():
            for output in outputs.outputs:
                tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
    return tokens


def test_steps_until_done() -> None:
    core = make_core(max_num_batched_tokens=8)
    add(core, request_of("a", [5] * 10))
    add(core, request_of("b", [6] * 3, max_tokens=2))
    assert core.step() == {}  # a partial prefill says nothing
    outputs = [core.step()[0].outputs for _ in range(3)]
    assert [[output.request_id for output in step] for step in outputs] == [["a", "b"], ["a", "b"], ["a"]]
    assert [output.finish_reason for output in outputs[1]] == [None, FinishReason.LENGTH]
    assert core.step()[0].outputs[0].finish_reason is FinishReason.LENGTH
    assert not core.scheduler.has_unfinished_requests()
    core.step()  # the executor hears that "a" has ended
    assert core.executor.rows == {}  # type: ignore[attr-defined]
    assert core.step() == {}


def test_eos() -> None:
    class Scripted(ToyExecutor):
        next_token = staticmethod(scripted({(5, 6): [9, EOS, 8, 7]}))

    core = make_core(Scripted)
    add(core, request_of("a", [5, 6], max_tokens=9))
    add(core, request_of("b", [5, 6], max_tokens=4, ignore_eos=True))
    assert run(core) == {"a": [9, EOS], "b": [9, EOS, 8, 7]}


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_random_load(prefix_caching: bool, async_scheduling: bool) -> None:
    """Few blocks, many requests with shared prefixes, preemptions and aborts: every token is the model's."""
    rng = random.Random(0)
    core = make_core(
        num_blocks=24,
        max_num_seqs=6,
        max_num_batched_tokens=16,
        prefix_caching=prefix_caching,
        async_scheduling=async_scheduling,
    )
    prompts = {f"r{i}": [7, 8, 9] * rng.randrange(4) + rng.choices(range(3, 20), k=rng.randint(1, 30)) for i in range(40)}
    lengths = {request_id: rng.randint(1, 20) for request_id in prompts}
    tokens: dict[str, list[int]] = {request_id: [] for request_id in prompts}
    todo, aborted, num_preempted = list(prompts), set(), 0
    while todo or core.scheduler.has_unfinished_requests():
        for _ in range(min(len(todo), rng.randrange(3))):
            request_id = todo.pop()
            add(core, request_of(request_id, prompts[request_id], lengths[request_id]))
        if core.scheduler.requests and rng.random() < 0.1:
            victim = rng.choice(list(core.scheduler.requests))
            aborted.add(victim)
            core.abort_requests([victim])
        for outputs in core.step().values():
            for output in outputs.outputs:
                assert output.request_id not in aborted
                tokens[output.request_id] += output.new_token_ids
        num_preempted += sum(request.num_preemptions > 0 for request in core.scheduler.requests.values())
    assert num_preempted
    assert 0 < len(aborted) < 20
    for request_id, prompt in prompts.items():
        expected = expected_tokens(prompt, lengths[request_id])
        assert tokens[request_id] == (expected[: len(tokens[request_id])] if request_id in aborted else expected)
    assert core.reset_prefix_cache()


def test_abort_in_every_state() -> None:
    """Waiting, in the middle of a prefill, decoding, preempted, ended, unknown."""
    core = make_core(max_num_batched_tokens=8, max_num_seqs=2)
    for request_id, length in (("decoding", 3), ("prefill", 20), ("waiting", 3), ("other", 3)):
        add(core, request_of(request_id, [hash_next((length,))] * length, max_tokens=30))
    core.step()
    core.abort_requests(["waiting", "prefill", "decoding", "unknown"])
    core.abort_requests(["decoding"])
    assert list(core.scheduler.requests) == ["other"]
    core.step()
    assert core.reset_prefix_cache(reset_running_requests=True)
    (other,) = core.scheduler.requests.values()
    assert other.num_preemptions == 1
    core.abort_requests(["other"])
    assert not core.scheduler.has_unfinished_requests()
    core.step()
    assert core.executor.rows == {}  # type: ignore[attr-defined]
    assert core.reset_prefix_cache()


def test_aborts_that_come_during_a_step() -> None:
    """The output of the step that runs is dropped."""
    core = make_core()
    add(core, request_of("a", [5, 6]))
    add(core, request_of("b", [5, 7]))
    core.executor.during_step = lambda output: core.queue_aborts(["a", "unknown"])  # type: ignore[attr-defined]
    (output,) = core.step()[0].outputs
    assert output.request_id == "b"
    assert list(core.scheduler.requests) == ["b"]


def test_ids_are_unique() -> None:
    core = make_core()
    add(core, request_of("a", [5]))
    with pytest.raises(ValueError, match="request_id 'a' is in use"):
        add(core, request_of("a", [5]))
    assert run(core) == {"a": expected_tokens([5], 4)}
    add(core, request_of("a", [5]))  # it has ended, so its name is free
    assert run(core) == {"a": expected_tokens([5], 4)}


def test_each_front_end_gets_its_own() -> None:
    core = make_core(log_stats=True)
    add(core, request_of("a", [5], max_tokens=1, client_index=3))
    add(core, request_of("b", [6], max_tokens=1, client_index=1))
    outputs = core.step()
    assert {index: [output.request_id for output in got.outputs] for index, got in outputs.items()} == {3: ["a"], 1: ["b"]}
    assert {index: got.finished_requests for index, got in outputs.items()} == {3: {"a"}, 1: {"b"}}
    # Statistics go to one of them.
    assert sum(got.scheduler_stats is not None for got in outputs.values()) == 1


def test_statistics_of_a_step_without_output() -> None:
    core = make_core(log_stats=True, max_num_batched_tokens=8)
    add(core, request_of("a", [5] * 10))
    outputs = core.step()[0]
    assert outputs.outputs == []
    assert outputs.scheduler_stats is not None
    assert (outputs.scheduler_stats.num_running_reqs, outputs.scheduler_stats.num_waiting_reqs) == (1, 0)
    assert make_core().step() == {}


def test_failing_step_is_final() -> None:
    class Failing(ToyExecutor):
        def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
            raise MemoryError("device")

    core = make_core(Failing)
    add(core, request_of("a", [5]))
    core.check_health()
    with pytest.raises(EngineDeadError, match=r"MemoryError\('device'\)") as raised:
        core.step()
    assert isinstance(raised.value.__cause__, MemoryError)
    for call in (
        core.step,
        core.check_health,
        core.reset_prefix_cache,
        lambda: add(core, request_of("b", [5])),
        lambda: core.collective_rpc("describe", args=("x",)),
    ):
        with pytest.raises(EngineDeadError, match="device"):
            call()
    core.abort_requests(["a"])
    core.shutdown()
    assert core.executor.num_shutdowns == 1  # type: ignore[attr-defined]


def test_interrupt_amid_a_step_is_seen_and_final() -> None:
    def interrupt(scheduler_output: SchedulerOutput) -> None:
        raise KeyboardInterrupt

    core = make_core()
    add(core, request_of("a", [5]))
    core.executor.during_step = interrupt  # type: ignore[attr-defined]
    with pytest.raises(KeyboardInterrupt):
        core.step()
    with pytest.raises(EngineDeadError, match="KeyboardInterrupt"):
        core.step()


def test_failing_start_shuts_the_executor_down() -> None:
    made: list[ToyExecutor] = []

    class Failing(ToyExecutor):
        def initialize(self) -> KVCacheConfig:
            made.append(self)
            raise ValueError("gpu_memory_utilization is too small")

    with pytest.raises(ValueError, match="gpu_memory_utilization"):
        make_core(Failing)
    assert made[0].num_shutdowns == 1


def test_after_shutdown() -> None:
    core = make_core()
    core.shutdown()
    core.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        core.step()


def test_collective_rpc() -> None:
    core = make_core()
    assert core.collective_rpc("describe", timeout=3.0, args=("x",)) == [("x", 0, 3.0)]
    assert core.collective_rpc("describe", kwargs={"name": "y"}) == [("y", 0, None)]
    with pytest.raises(AttributeError):
        core.collective_rpc("missing")


def test_reset_prefix_cache_waits_for_blocks() -> None:
    core = make_core()
    add(core, request_of("a", [5] * 9))
    core.step()
    assert not core.reset_prefix_cache()
    run(core)
    assert core.reset_prefix_cache()


def test_inproc_client() -> None:
    client = InprocClient(make_config(), ToyExecutor, False)
    assert client.get_output().outputs == []
    client.add_request(request_of("a", [5], max_tokens=1))
    client.add_request(request_of("b", [5]))
    client.abort_requests(["b"])
    client.check_health()
    (output,) = client.get_output().outputs
    assert (output.request_id, output.new_token_ids) == ("a", expected_tokens([5], 1))
    assert client.reset_prefix_cache()
    assert client.collective_rpc("describe", args=("x",))[0][0] == "x"
    client.shutdown()
    with pytest.raises(EngineDeadError):
        client.check_health()
