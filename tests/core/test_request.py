"""Request and RequestStatus."""

import pytest
from core_builders import EOS, make_request

from jaxllm.core.kv_cache_utils import BlockHasher
from jaxllm.core.request import Request, RequestStatus
from jaxllm.core.types import EngineCoreEvent, EngineCoreRequest, EventType, FinishReason
from jaxllm.sampling_params import SamplingParams


def test_a_new_request() -> None:
    request = make_request("a", [10, 11, 12], max_tokens=5, priority=3, arrival_time=1.5, client_index=2, stop_token_ids=[9])
    assert (request.request_id, request.priority, request.arrival_time, request.client_index) == ("a", 3, 1.5, 2)
    assert (request.status, request.status.is_finished, request.status.finish_reason) == (RequestStatus.WAITING, False, None)
    assert (request.num_tokens, request.num_prompt_tokens, request.num_output_tokens) == (3, 3, 0)
    assert (request.num_computed_tokens, request.num_cached_tokens, request.num_preemptions) == (0, -1, 0)
    assert (request.eos_token_id, request.stop_token_ids, request.max_tokens) == (EOS, [9], 5)
    assert request.block_hashes == []


def test_tokens() -> None:
    request = make_request("a", [10, 11, 12])
    request.append_output_token_ids([13])
    request.append_output_token_ids([14, 15])
    request.spec_token_ids = [16, 17]
    assert request.all_token_ids == [10, 11, 12, 13, 14, 15]
    assert (request.prompt_token_ids, request.output_token_ids) == ([10, 11, 12], [13, 14, 15])
    assert (request.num_tokens, request.num_output_tokens, request.num_tokens_with_spec) == (6, 3, 8)


def test_the_prompt_is_copied() -> None:
    prompt = [1, 2, 3]
    request = Request.from_engine_core_request(EngineCoreRequest("a", prompt, SamplingParams()), None)
    request.append_output_token_ids([4])
    assert prompt == [1, 2, 3]


def test_ignore_eos() -> None:
    assert make_request("a", 3, ignore_eos=True).eos_token_id is None


def test_blocks_are_hashed_as_they_fill() -> None:
    hasher = BlockHasher(4)
    tokens = list(range(100, 114))
    expected: list[bytes] = []
    hasher.extend(expected, tokens)
    request = make_request("a", tokens[:6], hasher)
    seen = [len(request.block_hashes)]
    for token_id in tokens[6:9]:
        request.append_output_token_ids([token_id])
        seen.append(len(request.block_hashes))
    assert seen == [1, 1, 2, 2]
    request.append_output_token_ids(tokens[9:])
    assert request.block_hashes == expected
    assert len(expected) == 3


def test_salt_enters_the_first_block_and_extra_keys_every_block() -> None:
    hasher = BlockHasher(2)
    plain, salted, keyed = (
        make_request("a", [1, 2, 3, 4], hasher, cache_salt=salt, extra_keys=keys).block_hashes
        for salt, keys in ((None, ()), ("s", ()), (None, ("adapter",)))
    )
    assert not set(plain) & set(salted)
    assert not set(plain) & set(keyed)
    # Only the chain carries the salt on: under the same parent the second block is hashed as without a salt.
    second = [plain[0]]
    hasher.extend(second, [1, 2, 3, 4])
    assert second == plain
    again = make_request("b", [1, 2], hasher, cache_salt="s")
    again.append_output_token_ids([3, 4])
    assert again.block_hashes == salted


def test_events_are_taken_once() -> None:
    request = make_request("a", 3)
    request.record_event(EventType.QUEUED, 1.0)
    request.record_event(EventType.SCHEDULED, 2.0)
    assert request.take_events() == [EngineCoreEvent(EventType.QUEUED, 1.0), EngineCoreEvent(EventType.SCHEDULED, 2.0)]
    assert request.take_events() is None


def test_finish_reasons() -> None:
    assert {status.name: str(status.finish_reason) for status in RequestStatus if status.is_finished} == {
        "FINISHED_STOPPED": "stop",
        "FINISHED_LENGTH_CAPPED": "length",
        "FINISHED_ABORTED": "abort",
        "FINISHED_ERROR": "error",
        "FINISHED_REPETITION": "repetition",
    }
    assert RequestStatus.FINISHED_ERROR.finish_reason is FinishReason.ERROR
    assert [status.finish_reason for status in RequestStatus if not status.is_finished] == [None] * 3


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], SamplingParams(), "prompt_token_ids"),
        ([1], SamplingParams(max_tokens=None), "max_tokens"),
        ([1], SamplingParams(n=2), "n of request"),
    ],
)
def test_what_the_input_processor_should_have_completed(prompt: list[int], params: SamplingParams, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Request.from_engine_core_request(EngineCoreRequest("a", prompt, params), None)


def test_a_token_id_that_cannot_be_hashed() -> None:
    with pytest.raises(ValueError, match=r"token ids must be integers in \[0, 2\*\*32\), got \[1, -1\]"):
        make_request("a", [1, -1], BlockHasher(2))
