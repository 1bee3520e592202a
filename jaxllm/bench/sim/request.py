"""SimRequest: a Request whose tokens have no values, so that millions of them fit in memory."""

from collections.abc import Sequence

from jaxllm.core.kv_cache_utils import BlockHasher
from jaxllm.core.request import Request, RequestStatus
from jaxllm.core.types import EventType
from jaxllm.sampling_params import SamplingParams

# Nothing of it depends on the request: every one runs to its own `max_tokens`.
_PARAMS = SamplingParams(max_tokens=1, ignore_eos=True)
_TOKEN = b"\0"


class SimRequest(Request):
    """What the scheduler knows of a request, with a zero byte for each token.

    Block hashes are given instead of computed: the scheduler only asks whether two are equal. Hashes of blocks that the output
    fills belong to this request alone.

    Args:
        index: of the request in the workload.
        num_prompt_tokens: at least 1.
        num_output_tokens: after which it ends.
        prompt_hashes: of its full prompt blocks, equal to another's where the prompts are equal up to that block's end.
        output_hash: of the first block that the output fills; those after it count up. They must be nobody else's.
        block_hasher: of the scheduler; None if prefix caching is off.

    Attributes:
        serial: rises with each admission, so that it orders the running list.
        first_time, token_time: of its first and its latest token, seconds of virtual time; -1 before the first.
        parked_at: steps that had been started when it was parked.
    """

    __slots__ = ("first_time", "index", "next_hash", "parked_at", "serial", "token_time")

    def __init__(
        self,
        index: int,
        num_prompt_tokens: int,
        num_output_tokens: int,
        prompt_hashes: Sequence[int],
        output_hash: int,
        block_hasher: BlockHasher | None,
        arrival_time: float,
        priority: int = 0,
    ) -> None:
        self.index = index
        self.request_id = str(index)
        self.serial = self.parked_at = 0
        self.first_time = self.token_time = -1.0
        self.client_index = 0
        self.priority = priority
        self.arrival_time = arrival_time
        self.sampling_params = _PARAMS
        self.max_tokens = num_output_tokens
        self.stop_token_ids = self.end_token_ids = ()
        self.needs_host_each_token = False
        self.eos_token_id = None
        self.status = RequestStatus.WAITING
        self.stop_reason = None
        self.events = []
        # One byte a token: `len`, the last one and `copy` are all that the scheduler asks for.
        self.all_token_ids = bytearray(num_prompt_tokens)  # type: ignore[assignment]
        self.num_prompt_tokens = num_prompt_tokens
        self.spec_token_ids = []
        self.num_computed_tokens = self.num_output_placeholders = self.num_steps_in_flight = 0
        self.is_prefill_chunk = False
        self.num_cached_tokens = -1
        self.num_preemptions = self.kv_quiet_until = 0
        self.block_hasher = block_hasher
        self.block_hashes = list(prompt_hashes) if block_hasher is not None else []
        self.next_hash = output_hash

    def append_output_token_ids(self, token_ids: Sequence[int]) -> None:
        self.advance(len(token_ids))

    def advance(self, count: int) -> None:
        """Append `count` tokens and the hashes of the blocks that they fill."""
        tokens = self.all_token_ids
        tokens += _TOKEN * count
        if self.block_hasher is not None:
            missing = len(tokens) // self.block_hasher.block_size - len(self.block_hashes)
            if missing:
                self.block_hashes += range(self.next_hash, self.next_hash + missing)
                self.next_hash += missing

    def record_event(self, event_type: EventType, timestamp: float) -> None:
        """Nobody reads events here."""
