"""AsyncScheduler: the next step is scheduled before the tokens of this one are known."""

from jaxllm.core.output import SchedulerOutput
from jaxllm.core.request import Request
from jaxllm.core.scheduler import Scheduler


class AsyncScheduler(Scheduler):
    """Counts a placeholder for each token that a step in flight will sample, so that the next step can compute it.

    Its value is not needed for that: the devices take a row's next input from the token that they sampled last. What does need
    the value (a stop token, the end of the model's length) is found one step late, and that step's token is dropped.
    """

    def _update_after_schedule(self, requests: list[Request], output: SchedulerOutput) -> None:
        super()._update_after_schedule(requests, output)
        for request in requests:
            if not request.is_prefill_chunk:
                is_multi_step = output.num_decode_steps > 1
                request.num_output_placeholders += output.num_scheduled_tokens[request.request_id] if is_multi_step else 1
