"""ScheduledStep: the step that the scheduler is putting together."""

from dataclasses import dataclass, field

from jaxllm.core.kv_cache_manager import BlockIds
from jaxllm.core.request import Request


@dataclass(slots=True)
class ScheduledStep:
    """A step being put together.

    Attributes:
        token_budget: tokens that may still be scheduled.
        max_rows: most requests.
        max_tokens_per_request: most tokens of one request.
        running: requests scheduled from the running list, in order.
        admitted: requests scheduled from the queue, in order.
        num_scheduled_tokens: request id → tokens, in the order of scheduling.
        new_block_ids: of requests in `running` that got blocks.
        num_decode_steps: as in SchedulerOutput.
    """

    token_budget: int
    max_rows: int
    max_tokens_per_request: int
    timestamp: float
    running: list[Request] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
    preempted_req_ids: set[str] = field(default_factory=set)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    new_block_ids: dict[str, BlockIds] = field(default_factory=dict)
    spec_decode_tokens: dict[str, list[int]] = field(default_factory=dict)
    num_decode_steps: int = 1

    def take_back(self, request: Request) -> int:
        """Unschedule a request from the running list. Returns the tokens that were scheduled, 0 if it was not."""
        num_tokens = self.num_scheduled_tokens.pop(request.request_id, 0)
        if num_tokens:
            self.running.remove(request)
            self.new_block_ids.pop(request.request_id, None)
            self.spec_decode_tokens.pop(request.request_id, None)
        return num_tokens
