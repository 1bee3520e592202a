"""How many tokens each request may decode in one step, one after the other."""

from collections.abc import Sequence

from jaxllm.core.kv_cache_manager import KVCacheManager
from jaxllm.core.request import Request
from jaxllm.core.scheduled_step import ScheduledStep


def decode_counts(requests: Sequence[Request], max_steps: int, max_model_len: int, manager: KVCacheManager) -> list[int]:
    """For a step of these requests and no other, one token each so far.

    Not while a request needs the host after each token, or has a prompt to compute; and never at the price of a preemption: where
    blocks are short, fewer tokens are decoded.

    Args:
        requests: running, with the blocks of their next token, which is not counted as computed yet.
        max_steps: most tokens of a request.

    Returns:
        Tokens of each request, at least 1 each; empty if there is nothing to gain.
    """
    rooms = []
    for request in requests:
        num_tokens = len(request.all_token_ids) + request.num_output_placeholders
        num_outputs = num_tokens - request.num_prompt_tokens
        decodes = num_outputs > 0 and request.num_computed_tokens + 1 == num_tokens
        if not decodes or request.needs_host_each_token:
            return []
        rooms.append(max(1, min(request.max_tokens - num_outputs, max_model_len - num_tokens)))
    num_steps = min(max_steps, max(rooms, default=1))
    while num_steps > 1:
        counts = [min(room, num_steps) for room in rooms]
        if manager.fits(requests, counts):
            return counts
        num_steps //= 2
    return []


def extend_decodes(step: ScheduledStep, max_steps: int, max_model_len: int, manager: KVCacheManager) -> None:
    """Let a step of nothing but decodes, of one token each so far, go on for several tokens a request, with blocks for them.

    Args:
        max_steps, max_model_len: as for `decode_counts`.
    """
    counts = decode_counts(step.running, max_steps, max_model_len, manager)
    step.num_decode_steps = max(counts, default=1)
    for request, num_tokens in zip(step.running, counts, strict=False):
        request_id = request.request_id
        block_ids = manager.allocate_slots(request, num_tokens)
        assert block_ids is not None, f"no blocks for {num_tokens} tokens of request {request_id!r}, which were counted"
        if block_ids:
            first = step.new_block_ids.get(request_id)
            both = block_ids if first is None else tuple(a + b for a, b in zip(first, block_ids, strict=True))
            step.new_block_ids[request_id] = both
        step.token_budget -= num_tokens - step.num_scheduled_tokens[request_id]
        step.num_scheduled_tokens[request_id] = num_tokens
