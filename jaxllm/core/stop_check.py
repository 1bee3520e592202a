"""When a request ends by itself. Stop strings are the front end's business: it has the text."""

from collections.abc import Sequence

from jaxllm.core.request import Request, RequestStatus
from jaxllm.sampling_params import RepetitionDetectionParams


def check_stop(request: Request, max_model_len: int) -> bool:
    """Whether the last token of `request` ends it; if so, sets its status and stop reason.

    The order decides which reason is given: EOS, a stop token, the length, repetition. `min_tokens` holds back repetition only:
    EOS and stop tokens are not sampled before it is reached, and no length lies below it.

    Args:
        request: with at least one output token; the caller checks after each token.
        max_model_len: most tokens of prompt and output together.
    """
    token_ids = request.all_token_ids
    last = token_ids[-1]
    if last == request.eos_token_id:
        request.status = RequestStatus.FINISHED_STOPPED
        return True
    if last in request.stop_token_ids:
        request.status = RequestStatus.FINISHED_STOPPED
        request.stop_reason = last
        return True
    num_tokens = len(token_ids)
    num_output_tokens = num_tokens - request.num_prompt_tokens
    if num_tokens >= max_model_len or num_output_tokens >= request.max_tokens:
        request.status = RequestStatus.FINISHED_LENGTH_CAPPED
        return True
    params = request.sampling_params
    if (
        params.repetition_detection is not None
        and num_output_tokens >= params.min_tokens
        and ends_in_repetition(token_ids, request.num_prompt_tokens, params.repetition_detection)
    ):
        request.status = RequestStatus.FINISHED_REPETITION
        request.stop_reason = "repetition_detected"
        return True
    return False


def ends_in_repetition(token_ids: Sequence[int], start: int, params: RepetitionDetectionParams) -> bool:
    """Whether `token_ids[start:]` ends in `min_count` copies of one pattern of an allowed size.

    Looks at no more than the last `max_pattern_size * min_count` tokens.
    """
    stop = len(token_ids)
    for size in range(params.min_pattern_size, params.max_pattern_size + 1):
        first = stop - size * params.min_count
        if first < start:
            return False
        # Copies of a pattern of this size: every token equals the one that stands `size` before it.
        if token_ids[stop - 1] == token_ids[stop - 1 - size] and token_ids[first + size : stop] == token_ids[first : stop - size]:
            return True
    return False
