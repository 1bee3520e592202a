"""Admission control: an engine that has enough to do refuses more, rather than let it wait without end."""

from jaxllm.config import EngineConfig
from jaxllm.engine.errors import AdmissionError, MaxQueuedTokensError, QueueOverflowError
from jaxllm.engine.metrics import EngineMetrics
from jaxllm.engine.output_processor import OutputProcessor


class AdmissionControl:
    """
    Args:
        processor: knows what is unfinished.
        metrics: counts what is refused; None to count nothing.
    """

    def __init__(self, config: EngineConfig, processor: OutputProcessor, metrics: EngineMetrics | None) -> None:
        self.max_num_reqs = config.max_num_queued_reqs
        self.max_num_tokens = config.max_num_queued_tokens
        self.processor = processor
        self.metrics = metrics

    def check(self, n: int, prompt_len: int) -> None:
        """Whether there is room for n requests with the same prompt of `prompt_len` tokens: for all of them or for none.

        Raises:
            QueueOverflowError: if there would be more than `max_num_queued_reqs` unfinished requests.
            MaxQueuedTokensError: if there would be more than `max_num_queued_tokens` prompt tokens of requests without output.
                Where there are none yet, any prompt is taken.
        """
        num_reqs, num_tokens = self.processor.num_unfinished_requests, self.processor.num_queued_tokens
        if self.max_num_reqs is not None and num_reqs + n > self.max_num_reqs:
            self._refuse(
                QueueOverflowError(
                    f"there are {num_reqs} unfinished requests; with {n} more there would be more than the "
                    f"{self.max_num_reqs} that max_num_queued_reqs allows"
                )
            )
        if self.max_num_tokens is not None and num_tokens and num_tokens + n * prompt_len > self.max_num_tokens:
            self._refuse(
                MaxQueuedTokensError(
                    f"{num_tokens} prompt tokens are queued; with {n * prompt_len} more there would be more than the "
                    f"{self.max_num_tokens} that max_num_queued_tokens allows"
                )
            )

    def _refuse(self, error: AdmissionError) -> None:
        if self.metrics is not None:
            self.metrics.admission_rejections[error.limit].value += 1
        raise error
