"""AsyncScheduler: the next step is scheduled before the tokens of this one are known."""

from collections import deque

from jaxllm.config import CacheConfig, SchedulerConfig
from jaxllm.core.kv_cache_interface import KVCacheConfig
from jaxllm.core.output import SchedulerOutput
from jaxllm.core.request import Request
from jaxllm.core.scheduler import Scheduler


class AsyncScheduler(Scheduler):
    """Counts a placeholder for each token that a step in flight will sample, so that the next step can compute it.

    Its value is not needed for that: the devices take a row's next input from the token that they sampled last. What does need
    the value (a stop token, the end of the model's length) is found one step late, and that step's token is dropped.

    In a pipeline that token is sampled when a step leaves the last stage. A request that samples is passed over until its step
    has come so far, as many steps as there are stages: else the first stage would wait for the last, and the others with it.
    """

    def __init__(self, scheduler_config: SchedulerConfig, cache_config: CacheConfig, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(scheduler_config, cache_config, kv_cache_config)
        # Requests that sample in the step being scheduled, and in the steps before it that have not come to the last stage.
        self._sampling: set[str] = set()
        self._on_their_way: deque[set[str]] = deque(maxlen=scheduler_config.num_pipeline_stages - 1)

    def schedule(self, timestamp: float = 0.0) -> SchedulerOutput:
        output = super().schedule(timestamp)
        if self._on_their_way.maxlen:
            self._on_their_way.append(self._sampling)
            self._held_back = set().union(*self._on_their_way)
        self._sampling = set()
        return output

    def _update_after_schedule(self, requests: list[Request], output: SchedulerOutput) -> None:
        super()._update_after_schedule(requests, output)
        sampling = [request for request in requests if not request.is_prefill_chunk]
        is_multi_step = output.num_decode_steps > 1
        for request in sampling:
            request.num_output_placeholders += output.num_scheduled_tokens[request.request_id] if is_multi_step else 1
        if self._on_their_way.maxlen:
            self._sampling.update(request.request_id for request in sampling)
