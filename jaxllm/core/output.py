"""SchedulerOutput and ModelRunnerOutput: the only things that pass between the scheduler and the workers."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from jaxllm.sampling_params import SamplingParams

# Token ids that end a request and that the devices know. A request with more is decoded one step at a time.
MAX_END_TOKEN_IDS = 16


class LogprobsLists(NamedTuple):
    """Log probabilities of n positions. The first column is the sampled (or prompt) token, the others the k best.

    Attributes:
        token_ids: int32 [n, 1 + k].
        logprobs: float32 [n, 1 + k].
        ranks: int32 [n], the 1-based rank of the first column in the whole vocabulary.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    ranks: np.ndarray

    def slice(self, start: int, stop: int) -> "LogprobsLists":
        """Positions `start` to `stop`, sharing memory."""
        return LogprobsLists(self.token_ids[start:stop], self.logprobs[start:stop], self.ranks[start:stop])


@dataclass(slots=True)
class NewRequestData:
    """A request that the workers do not know: newly admitted, or resumed after a preemption.

    Attributes:
        token_ids: all known token ids, the outputs of a resumed request included.
        num_prompt_tokens: how many of them are the prompt.
        block_ids: the whole block table, one list for each KV cache group.
        num_computed_tokens: tokens whose KV is in the cache already; the first one scheduled now has this position.
        end_token_ids: those that end the request, EOS among them; empty if there are more than MAX_END_TOKEN_IDS.
    """

    req_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    sampling_params: SamplingParams
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int
    end_token_ids: tuple[int, ...] = ()


@dataclass(slots=True)
class CachedRequestData:
    """Requests that the workers know: only what changed. The lists run in parallel.

    Attributes:
        new_block_ids: blocks to append, one list for each KV cache group; None if there are none.
        num_computed_tokens: before this step.
        num_output_tokens: sampled so far, in-flight placeholders included.
    """

    req_ids: list[str] = field(default_factory=list)
    new_block_ids: list[tuple[list[int], ...] | None] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)
    num_output_tokens: list[int] = field(default_factory=list)


@dataclass(slots=True)
class SchedulerOutput:
    """One step's work.

    Attributes:
        num_scheduled_tokens: tokens to compute for each request, in the order of scheduling.
        scheduled_spec_decode_tokens: draft tokens among them.
        finished_req_ids: requests that ended since the last step; the workers forget them before anything else.
        preempted_req_ids: requests preempted in this step; the workers forget these too. A resumed request comes back as new.
        num_decode_steps: if more than 1, every request decodes, and `num_scheduled_tokens` says how many tokens one after the
            other: at most this many, fewer if one of its `end_token_ids` is sampled.
    """

    scheduled_new_reqs: list[NewRequestData] = field(default_factory=list)
    scheduled_cached_reqs: CachedRequestData = field(default_factory=CachedRequestData)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    total_num_scheduled_tokens: int = 0
    scheduled_spec_decode_tokens: dict[str, list[int]] = field(default_factory=dict)
    finished_req_ids: set[str] = field(default_factory=set)
    preempted_req_ids: set[str] = field(default_factory=set)
    num_decode_steps: int = 1


class WorkerStepStats(NamedTuple):
    """What a step cost the workers.

    Attributes:
        dispatch_time: seconds until the step was handed to the device: rows, packing, upload.
        wait_time: seconds from then until its results were on the host.
        num_padding_tokens: computed for nobody, to fill the bucket.
        num_compiles: programs compiled since the engine was ready, in all steps; a fault if it is not 0.
        num_tokens: computed for requests.
    """

    dispatch_time: float = 0.0
    wait_time: float = 0.0
    num_padding_tokens: int = 0
    num_compiles: int = 0
    num_tokens: int = 0


@dataclass(slots=True)
class ModelRunnerOutput:
    """What the workers made of one SchedulerOutput.

    Attributes:
        req_ids: the requests of the step, in the order of the rows.
        req_id_to_index: the row of each.
        sampled_token_ids: new token ids of each row; empty for a partial prefill.
        logprobs: of the sampled tokens of all rows that asked for them, concatenated; see `logprobs_start`.
        logprobs_start: for a request that asked for logprobs, its first position in `logprobs`.
        prompt_logprobs: for a request whose prefill ended in this step, those of prompt tokens 1 to the last.
        stats: None where nobody counts.
    """

    req_ids: list[str] = field(default_factory=list)
    req_id_to_index: dict[str, int] = field(default_factory=dict)
    sampled_token_ids: list[list[int]] = field(default_factory=list)
    logprobs: LogprobsLists | None = None
    logprobs_start: dict[str, int] = field(default_factory=dict)
    prompt_logprobs: dict[str, LogprobsLists] = field(default_factory=dict)
    stats: WorkerStepStats | None = None


EMPTY_MODEL_RUNNER_OUTPUT = ModelRunnerOutput()
