"""LLMEngine: the synchronous front end. Requests in, one step at a time, RequestOutputs out."""

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxllm.config import EngineConfig
from jaxllm.core.types import EngineCoreRequest
from jaxllm.engine.admission import AdmissionControl
from jaxllm.engine.core import PauseMode
from jaxllm.engine.core_client import EngineCoreClient, InprocClient
from jaxllm.engine.input_processor import InputProcessor, Prompt
from jaxllm.engine.metrics import EngineMetrics, IterationStats, Metric
from jaxllm.engine.mp_client import SyncMPClient
from jaxllm.engine.output_processor import OutputProcessor
from jaxllm.engine.parallel_sampling import ParentRequest
from jaxllm.executor.abstract import Executor
from jaxllm.outputs import RequestOutput
from jaxllm.sampling_params import SamplingParams
from jaxllm.trace import open_trace

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from jaxllm.engine.engine_args import EngineArgs, UsageContext


class CheckedRequest(NamedTuple):
    """A request that passed every check and is not queued yet.

    Attributes:
        request_id: as the caller gave it.
        prompt: its text, if it came as text.
    """

    request_id: str
    request: EngineCoreRequest
    prompt: str | None


class LLMEngine:
    """
    Args:
        tokenizer: None to take and give token ids only.
        executor_class: by default the one that the configuration names.
        multiprocess: run the engine core in a process of its own, which imports `executor_class` from its module.

    Raises:
        ValueError: for a configuration that does not fit the model or the devices.
        EngineStartError: if the engine core's process does not become ready.
    """

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: "PreTrainedTokenizerFast | None",
        executor_class: type[Executor] | None = None,
        *,
        multiprocess: bool = False,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.input_processor = InputProcessor(config, tokenizer)
        self.output_processor = OutputProcessor(tokenizer, config.log_stats, config.stream_interval)
        self.metrics = EngineMetrics(config.model.max_model_len) if config.log_stats else None
        self.admission = AdmissionControl(config, self.output_processor, self.metrics)
        self.engine_core: EngineCoreClient
        if config.parallel.data_parallel_backend != "mp":
            raise ValueError(f"data_parallel_backend must be 'mp' here, got {config.parallel.data_parallel_backend!r}")
        if config.parallel.data_parallel_size > 1:
            raise ValueError(
                f"data_parallel_size must be 1 here, got {config.parallel.data_parallel_size}: several engines are for servers "
                "(`python -m jaxllm.serve`, AsyncLLM); offline, start a process with an LLM for each share of the prompts"
            )
        if not config.parallel.num_local_engines:
            raise ValueError("data_parallel_size_local must be 1 here, got 0: engines on other machines are for servers")
        if multiprocess:
            self.engine_core = SyncMPClient(config, executor_class, config.log_stats)
        else:
            self.engine_core = InprocClient(config, executor_class or Executor.get_class(config), config.log_stats)
        self._trace = open_trace(config.profile_dir, "front end")

    @classmethod
    def from_engine_args(cls, args: "EngineArgs", usage: "UsageContext" = "llm", *, multiprocess: bool = False) -> "LLMEngine":
        """The engine that `args` describe.

        Raises:
            ValueError: naming the argument and its value.
        """
        return cls(args.create_engine_config(usage), args.load_tokenizer(), multiprocess=multiprocess)

    def check_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        arrival_time: float | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        trace_headers: Mapping[str, str] | None = None,
    ) -> CheckedRequest:
        """Check and tokenize; see InputProcessor.process_inputs. Nothing is queued."""
        request, text = self.input_processor.process_inputs(
            request_id, prompt, params, arrival_time, priority, cache_salt, trace_headers
        )
        return CheckedRequest(request_id, request, text)

    def queue_request(self, checked: CheckedRequest) -> None:
        """Queue what `check_request` gave, as n requests if its `n` is greater than 1.

        Raises:
            QueueOverflowError, MaxQueuedTokensError: if the engine takes no more requests now.
        """
        request_id, request, prompt = checked
        self.admission.check(request.sampling_params.n, len(request.prompt_token_ids))
        if request.sampling_params.n == 1:
            self._queue(request, request_id, prompt, None, 0)
            return
        parent = ParentRequest(request)
        for index, child in enumerate(parent.make_children(request)):
            self._queue(child, request_id, prompt, parent, index)

    def _queue(
        self, request: EngineCoreRequest, request_id: str, prompt: str | None, parent: ParentRequest | None, index: int
    ) -> None:
        self.output_processor.add_request(request, request_id, prompt, parent, index)
        try:
            self.engine_core.add_request(request)
        except BaseException:
            # All of it or nothing: of n requests, those queued already go too.
            internal_id = request.request_id if parent is None else parent.request_id
            self.engine_core.abort_requests(self.output_processor.abort_requests([internal_id], internal=True))
            raise

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        arrival_time: float | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        trace_headers: Mapping[str, str] | None = None,
    ) -> None:
        """Check a request and queue it.

        Args:
            request_id: the id that its outputs carry.
            arrival_time: seconds, `time.time()`; by default now.
            priority: lower is served first, under the priority policy.

        Raises:
            ValueError: naming the field, its value and the limit; nothing has been queued then.
        """
        self.queue_request(self.check_request(request_id, prompt, params, arrival_time, priority, cache_salt, trace_headers))

    def step(self) -> list[RequestOutput]:
        """Run one step.

        Returns:
            The outputs that are due, of finished and (but for FINAL_ONLY) unfinished requests.

        Raises:
            EngineDeadError: if the engine core failed.
        """
        outputs = self.engine_core.get_output()
        start = time.monotonic()
        iteration = IterationStats(time.time()) if self.metrics is not None else None
        processed = self.output_processor.process_outputs(outputs.outputs, outputs.timestamp, iteration)
        if processed.reqs_to_abort:
            self.engine_core.abort_requests(processed.reqs_to_abort)
        if self.metrics is not None and iteration is not None:
            self.metrics.record(outputs.scheduler_stats, iteration)
        if self._trace is not None:
            self._trace.span("detokenize", start, time.monotonic(), outputs=len(outputs.outputs))
        return processed.request_outputs

    def abort_request(self, request_ids: Iterable[str]) -> None:
        """End requests, by the ids that the caller gave. They give no more output; unknown ids are ignored."""
        self.engine_core.abort_requests(self.output_processor.abort_requests(request_ids))

    def has_unfinished_requests(self) -> bool:
        return bool(self.output_processor.num_unfinished_requests)

    def get_num_unfinished_requests(self) -> int:
        """Each of a request's `n` counts."""
        return self.output_processor.num_unfinished_requests

    def get_tokenizer(self) -> "PreTrainedTokenizerFast":
        """
        Raises:
            ValueError: if the engine has none.
        """
        if self.tokenizer is None:
            raise ValueError("the engine has no tokenizer: it was started with skip_tokenizer_init=True")
        return self.tokenizer

    def get_metrics(self) -> list[Metric]:
        """Totals since the start.

        Raises:
            ValueError: if the engine keeps no statistics.
        """
        if self.metrics is None:
            raise ValueError("the engine keeps no statistics: it was started with disable_log_stats=True")
        return self.metrics.snapshot()

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all cached blocks; see EngineCore.reset_prefix_cache."""
        return self.engine_core.reset_prefix_cache(reset_running_requests)

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of every worker; see Executor.collective_rpc."""
        return self.engine_core.collective_rpc(method, timeout, args, kwargs)

    def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Give the devices' memory back until `wake_up`; see EngineCore.sleep."""
        self.engine_core.sleep(level, mode)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Undo `sleep`; see EngineCore.wake_up."""
        self.engine_core.wake_up(tags)

    def is_sleeping(self) -> bool:
        return self.engine_core.is_sleeping()

    def check_health(self) -> None:
        """Raise EngineDeadError if the engine core failed, RuntimeError if a worker is gone."""
        self.engine_core.check_health()

    def shutdown(self) -> None:
        """Free the devices. May be called more than once."""
        self.engine_core.shutdown()
        if self._trace is not None:
            self._trace.close()
