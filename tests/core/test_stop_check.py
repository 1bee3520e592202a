"""When a request ends by itself, and why."""

import pytest
from core_builders import EOS, make_request
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.core.request import RequestStatus
from jaxllm.core.stop_check import check_stop, ends_in_repetition
from jaxllm.sampling_params import RepetitionDetectionParams

STOPPED, LENGTH, REPETITION = (
    RequestStatus.FINISHED_STOPPED,
    RequestStatus.FINISHED_LENGTH_CAPPED,
    RequestStatus.FINISHED_REPETITION,
)
TWICE = RepetitionDetectionParams(max_pattern_size=1)


@pytest.mark.parametrize(
    ("output", "params", "max_model_len", "status", "stop_reason"),
    [
        ([7], {}, 99, None, None),
        ([7, EOS], {}, 99, STOPPED, None),
        ([7, EOS], {"ignore_eos": True}, 99, None, None),
        ([7, 9], {"stop_token_ids": [8, 9]}, 99, STOPPED, 9),
        ([9, 7], {"stop_token_ids": [9]}, 99, None, None),
        # EOS named as a stop token: EOS is looked at first and gives no stop reason, unless it is ignored.
        ([EOS], {"stop_token_ids": [EOS]}, 99, STOPPED, None),
        ([EOS], {"stop_token_ids": [EOS], "ignore_eos": True}, 99, STOPPED, EOS),
        ([7, 7], {"max_tokens": 2}, 99, LENGTH, None),
        ([7], {"max_tokens": 2}, 99, None, None),
        ([7], {}, 4, LENGTH, None),
        ([7], {}, 5, None, None),
        # Both at once: a stop beats the length, the length beats a repetition.
        ([7, EOS], {"max_tokens": 2}, 99, STOPPED, None),
        ([7, 9], {"max_tokens": 2, "stop_token_ids": [9]}, 5, STOPPED, 9),
        ([7, 7], {"max_tokens": 2, "repetition_detection": TWICE}, 99, LENGTH, None),
        ([7, 7], {"repetition_detection": TWICE}, 99, REPETITION, "repetition_detected"),
        # The prompt ends in 3: only the output counts.
        ([3], {"repetition_detection": TWICE}, 99, None, None),
        # min_tokens holds back repetition alone; EOS below it was not sampled, and a length counts whatever it says.
        ([7, 7], {"min_tokens": 3, "repetition_detection": TWICE}, 99, None, None),
        ([7, 7, 7], {"min_tokens": 3, "repetition_detection": TWICE}, 99, REPETITION, "repetition_detected"),
        ([7], {"min_tokens": 3}, 4, LENGTH, None),
        ([EOS], {"min_tokens": 3}, 99, STOPPED, None),
    ],
)
def test_check_stop(output: list[int], params: dict, max_model_len: int, status: RequestStatus, stop_reason: object) -> None:
    request = make_request("a", [1, 2, 3], **{"max_tokens": 16, **params})
    request.append_output_token_ids(output)
    assert check_stop(request, max_model_len) == (status is not None)
    assert request.status is (status or RequestStatus.WAITING)
    assert request.stop_reason == stop_reason


@pytest.mark.parametrize(
    ("token_ids", "sizes", "min_count", "expected"),
    [
        ([], (1, 3), 2, False),
        ([5], (1, 3), 2, False),
        ([5, 5], (1, 1), 2, True),
        ([5, 5], (1, 1), 3, False),
        ([5, 5, 5], (1, 1), 3, True),
        ([5, 5, 6], (1, 1), 2, False),
        ([5, 6, 5, 6], (1, 1), 2, False),
        ([5, 6, 5, 6], (2, 2), 2, True),
        ([5, 6, 5, 6], (1, 2), 2, True),
        ([5, 6, 5, 6], (1, 9), 2, True),
        ([5, 6, 5, 6], (3, 9), 2, False),
        ([6, 5, 6], (1, 2), 2, False),
        ([1, 5, 6, 5, 6], (2, 2), 2, True),
        ([5, 6, 5, 6, 1], (2, 2), 2, False),
        ([1, 2, 3, 1, 2, 3, 1, 2, 3], (1, 3), 3, True),
        ([0, 2, 3, 1, 2, 3, 1, 2, 3], (1, 3), 3, False),
        ([1, 2, 3, 1, 2, 4, 1, 2, 3], (1, 3), 3, False),
        # One token over and over is also a pattern of two tokens over and over.
        ([5, 5, 5, 5], (2, 2), 2, True),
        ([5, 5, 5], (2, 2), 2, False),
    ],
)
def test_ends_in_repetition(token_ids: list[int], sizes: tuple[int, int], min_count: int, expected: bool) -> None:
    params = RepetitionDetectionParams(min_pattern_size=sizes[0], max_pattern_size=sizes[1], min_count=min_count)
    assert ends_in_repetition(token_ids, 0, params) == expected
    # A prompt before it is not looked at, even one that goes on with the pattern backwards.
    assert ends_in_repetition(token_ids * 4 + token_ids, len(token_ids) * 4, params) == expected


@given(st.lists(st.integers(0, 2), max_size=14), st.integers(1, 3), st.integers(0, 3), st.integers(2, 4), st.integers(0, 14))
def test_ends_in_repetition_is_what_it_says(token_ids: list[int], least: int, more: int, min_count: int, start: int) -> None:
    params = RepetitionDetectionParams(min_pattern_size=least, max_pattern_size=least + more, min_count=min_count)
    output = token_ids[start:]
    expected = any(
        len(output) >= size * min_count and output[len(output) - size * min_count :] == output[len(output) - size :] * min_count
        for size in range(least, least + more + 1)
    )
    assert ends_in_repetition(token_ids, start, params) == expected
