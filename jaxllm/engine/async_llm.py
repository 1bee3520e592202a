"""AsyncLLM: the front end of a server. Many requests at once, each an asynchronous stream of RequestOutputs.

The engine core runs in a process of its own. This one tokenizes, detokenizes and talks to clients; it never imports jax.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Self

from jaxllm.config import EngineConfig
from jaxllm.core.types import EngineCoreOutputs, EngineCoreRequest, SchedulerStats
from jaxllm.engine.admission import AdmissionControl
from jaxllm.engine.core import PauseMode
from jaxllm.engine.dp_client import DPLBAsyncMPClient
from jaxllm.engine.engine_group import FrontEnd
from jaxllm.engine.errors import EngineDeadError, EngineLostError
from jaxllm.engine.input_processor import InputProcessor, Prompt
from jaxllm.engine.metrics import EngineMetrics, IterationStats, Metric
from jaxllm.engine.mp_client import AsyncMPClient
from jaxllm.engine.output_collector import RequestOutputCollector
from jaxllm.engine.output_processor import OutputProcessor
from jaxllm.engine.parallel_sampling import ParentRequest
from jaxllm.executor.abstract import Executor
from jaxllm.outputs import RequestOutput
from jaxllm.sampling_params import SamplingParams
from jaxllm.trace import open_trace

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from jaxllm.engine.engine_args import EngineArgs, UsageContext

logger = logging.getLogger(__name__)

# Outputs processed before other tasks of the event loop get a turn: about a millisecond of work.
OUTPUTS_PER_TURN = 128
# A shorter text is tokenized at once, in a fraction of a millisecond. Token ids never go to a thread, since Python checks a list
# without letting another thread run.
LEAST_CHARS_FOR_THREAD = 512
# More would only take turns at the interpreter; with two, one giant prompt does not make the others wait.
NUM_TOKENIZER_THREADS = 2


class AsyncLLM:
    """An engine for one event loop at a time. The constructor and `shutdown` block; they may be called outside of it.

    Args:
        tokenizer: None to take and give token ids only.
        executor_class: by default the one that the configuration names. The engine core's process imports it from its module.
        front_end: to use engine cores that another process starts, with other front ends.

    Raises:
        ValueError: for a configuration that does not fit the model or the devices.
        EngineStartError: if the engine core's process does not become ready.
    """

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: "PreTrainedTokenizerFast | None",
        executor_class: type[Executor] | None = None,
        front_end: FrontEnd | None = None,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.input_processor = InputProcessor(config, tokenizer)
        self.output_processor = OutputProcessor(tokenizer, config.log_stats, config.stream_interval)
        parallel = config.parallel
        self._ranks = range(parallel.data_parallel_start_rank, parallel.data_parallel_start_rank + parallel.data_parallel_size)
        self.metrics = self._make_metrics() if config.log_stats else []
        self.admission = AdmissionControl(config, self.output_processor, self.metrics[0] if self.metrics else None)
        self._is_draining = False
        self._output_error: Exception | None = None
        self._moved_requests: set[str] = set()  # to another engine core, since theirs had died
        self._output_handler: asyncio.Task[None] | None = None
        self._is_one_of_several = front_end is not None
        self.engine_core: AsyncMPClient | DPLBAsyncMPClient
        if config.parallel.has_one_engine and front_end is None:
            self.engine_core = AsyncMPClient(config, executor_class, config.log_stats)
        else:
            self.engine_core = DPLBAsyncMPClient(config, executor_class, config.log_stats, front_end)
        self._trace = open_trace(config.profile_dir, "front end")
        self._tokenizer_threads = ThreadPoolExecutor(NUM_TOKENIZER_THREADS, thread_name_prefix="tokenize")

    def _make_metrics(self) -> list[EngineMetrics]:
        """By engine index."""
        max_model_len = self.config.model.max_model_len
        if self._ranks == range(1) and self.config.parallel.data_parallel_backend == "mp":
            return [EngineMetrics(max_model_len)]
        return [EngineMetrics(max_model_len, engine=str(rank)) for rank in self._ranks]

    @classmethod
    def from_engine_args(
        cls, args: "EngineArgs", usage: "UsageContext" = "server", executor_class: type[Executor] | None = None
    ) -> Self:
        """The engine that `args` describe.

        Raises:
            ValueError: naming the argument and its value; and as the constructor.
        """
        return cls(args.create_engine_config(usage), args.load_tokenizer(), executor_class)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        trace_headers: Mapping[str, str] | None = None,
        data_parallel_rank: int | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Generate for one prompt.

        A consumer that stops, closes the generator or is cancelled aborts the request. One that reads slowly gets outputs merged:
        none is lost, and none piles up.

        Args:
            request_id: the id that outputs carry. Several requests may share it; `abort` ends all of them.
            priority: lower is served first, under the priority policy.
            cache_salt: only prompts with the same salt share cached blocks.
            data_parallel_rank: which engine core is to run it; None leaves it to the load balancer.

        Yields:
            Outputs, as `sampling_params.output_kind` says; the last one is `finished`.

        Raises:
            ValueError: naming the field, its value and the limit.
            QueueOverflowError, MaxQueuedTokensError: if the engine takes no more requests now.
            RequestFailedError: if the engine core gave up on this request.
            EngineDeadError: if the engine core has died or dies.
        """
        outputs, internal_id = await self._add_request(
            prompt, sampling_params, request_id, priority, cache_salt, trace_headers, data_parallel_rank
        )
        finished = False
        try:
            while not finished:
                output = outputs.get_nowait() or await outputs.get()
                finished = output.finished
                yield output
        finally:
            if not finished:
                self._abort([internal_id], internal=True)

    async def _add_request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str,
        priority: int,
        cache_salt: str | None,
        trace_headers: Mapping[str, str] | None,
        data_parallel_rank: int | None,
    ) -> tuple[RequestOutputCollector, str]:
        """Check, tokenize and queue a request. Returns where its outputs come, and its internal id."""
        engine = None
        if data_parallel_rank is not None:
            if data_parallel_rank not in self._ranks:
                ranks = f"[{self._ranks[0]}, {self._ranks[-1]}]"
                raise ValueError(f"data_parallel_rank must be in {ranks}, got {data_parallel_rank!r}")
            engine = data_parallel_rank - self._ranks[0]
        self._check_accepting()
        # Before the work, and after it, when it is known how much it is.
        self.admission.check(1, 0)
        arguments = (request_id, prompt, params, time.time(), priority, cache_salt, trace_headers)
        if _num_chars(prompt) < LEAST_CHARS_FOR_THREAD:
            request, text = self.input_processor.process_inputs(*arguments)
        else:
            request, text = await asyncio.get_running_loop().run_in_executor(
                self._tokenizer_threads, self.input_processor.process_inputs, *arguments
            )
        if self._start_output_handler():
            await asyncio.sleep(0)  # it takes in what has happened since it last ran
        # From here on nobody else gets a turn, so that what is checked still holds when the request is queued.
        self._check_accepting()
        params = request.sampling_params
        self.admission.check(params.n, len(request.prompt_token_ids))
        outputs = RequestOutputCollector(params.output_kind)
        if params.n == 1:
            self._queue(request, request_id, text, outputs, engine)
        else:
            parent = ParentRequest(request)
            for index, child in enumerate(parent.make_children(request)):
                self._queue(child, request_id, text, outputs, engine, parent, index)
        return outputs, request.request_id

    def _queue(
        self,
        request: EngineCoreRequest,
        request_id: str,
        text: str | None,
        outputs: RequestOutputCollector,
        engine: int | None,
        parent: ParentRequest | None = None,
        index: int = 0,
    ) -> None:
        try:
            self.output_processor.add_request(request, request_id, text, parent, index, outputs)
            self.engine_core.add_request(request, engine)
        except BaseException:
            # All of it or nothing: of n requests, those queued already go too.
            self._abort([request.request_id if parent is None else parent.request_id], internal=True)
            raise

    def _abort(self, request_ids: Iterable[str], internal: bool) -> None:
        self.engine_core.abort_requests(self.output_processor.abort_requests(request_ids, internal))

    async def abort(self, request_ids: str | Iterable[str]) -> None:
        """End requests, by the ids that the caller gave. Their streams end with reason "abort"; unknown ids are ignored."""
        self._abort([request_ids] if isinstance(request_ids, str) else request_ids, internal=False)

    def _start_output_handler(self) -> bool:
        """Returns whether it did not run."""
        # Also when an earlier event loop took the last one with it.
        if self._output_handler is not None and not self._output_handler.done():
            return False
        self._output_handler = asyncio.get_running_loop().create_task(self._handle_outputs(), name="output_handler")
        return True

    async def _handle_outputs(self) -> None:
        """Bring the engine core's outputs to the streams, and its death."""
        try:
            while True:
                try:
                    outputs = await self.engine_core.get_output()
                except EngineLostError as loss:
                    self._lose_engine(loss)
                    continue
                await self._process(outputs)
        except Exception as error:
            if not isinstance(error, EngineDeadError):
                logger.exception("outputs cannot be processed")
                error = EngineDeadError(f"outputs cannot be processed: {error!r}")
            self._output_error = error
            self.output_processor.fail_all(str(error))

    def _lose_engine(self, loss: EngineLostError) -> None:
        """Its requests of which nothing has been given away begin again elsewhere, the others end."""
        moved, ended = [], []
        for request in loss.requests:
            # Once: a request of which engine cores die must not go to all of them.
            may_move = request.request_id not in self._moved_requests and self.output_processor.restart_request(request)
            if may_move and self._move(request):
                moved.append(request.request_id)
            elif request.request_id in self.output_processor.request_states:
                ended.append(request.request_id)
        logger.error("%s; of its requests %d begin again elsewhere, %d end", loss, len(moved), len(ended))
        self.output_processor.fail(ended, lambda: EngineLostError(str(loss), loss.engine_index))
        self._moved_requests &= self.output_processor.request_states.keys()
        self._moved_requests.update(moved)

    def _move(self, request: EngineCoreRequest) -> bool:
        try:
            self.engine_core.add_request(request)
        except EngineDeadError:
            return False  # there is no other
        return True

    async def _process(self, outputs: EngineCoreOutputs) -> None:
        begin = time.monotonic()
        iteration = IterationStats(time.time()) if self.metrics else None
        for start in range(0, len(outputs.outputs), OUTPUTS_PER_TURN):
            if start:
                await asyncio.sleep(0)
            processed = self.output_processor.process_outputs(
                outputs.outputs[start : start + OUTPUTS_PER_TURN], outputs.timestamp, iteration
            )
            self.engine_core.abort_requests(processed.reqs_to_abort)
        if iteration is not None:
            self.metrics[outputs.engine_index].record(outputs.scheduler_stats, iteration)
        if self._trace is not None:
            self._trace.span("detokenize", begin, time.monotonic(), outputs=len(outputs.outputs))

    @property
    def dead_error(self) -> EngineDeadError | None:
        """Why no request can be served any more; None while they can."""
        error = self._output_error or self.engine_core.dead_error
        return None if error is None else EngineDeadError(str(error))

    @property
    def num_engines(self) -> int:
        """That take requests, or will once they have been started again."""
        return self.engine_core.num_engines

    async def scale(self, data_parallel_size: int) -> None:
        """Change the number of engine cores while they serve; see DPLBAsyncMPClient.scale. Returns when it is done.

        Raises:
            ValueError: if it is no number of engine cores, or their number cannot change, or is changing.
            EngineStartError: if a new one does not become ready; all is as before then.
        """
        if not isinstance(self.engine_core, DPLBAsyncMPClient):
            raise ValueError("the number of engines is fixed: only data_parallel_backend 'ray' can change it")
        # Outputs are what a leaving engine core is waited for.
        self._start_output_handler()
        await self.engine_core.scale(data_parallel_size)
        first = self._ranks.start
        self._ranks = range(first, first + data_parallel_size)
        if self.metrics:
            max_model_len = self.config.model.max_model_len
            # One that has left keeps what it has counted.
            new = self._ranks[len(self.metrics) :]
            self.metrics += [EngineMetrics(max_model_len, engine=str(rank)) for rank in new]

    @property
    def errored(self) -> bool:
        return self.dead_error is not None

    @property
    def is_running(self) -> bool:
        return self.dead_error is None

    async def check_health(self) -> None:
        """Raise EngineDeadError if the engine core has died. Does not wait for it: a step may take long and still be well."""
        if (error := self.dead_error) is not None:
            raise error

    def _check_accepting(self) -> None:
        if (error := self.dead_error) is not None:
            raise error
        if self._is_draining:
            raise EngineDeadError("the engine is shutting down and takes no more requests")

    @property
    def num_unfinished_requests(self) -> int:
        """Each of a request's `n` counts."""
        return self.output_processor.num_unfinished_requests

    async def pause_generation(self, mode: PauseMode = "abort", clear_cache: bool = True) -> None:
        """Take no more steps until `resume_generation`; requests that come meanwhile wait. Returns when it is done.

        Args:
            mode: what happens to the requests that there are: "abort" ends them, "wait" runs them to their end first, "keep"
                leaves them as they are, to go on afterwards.
            clear_cache: forget all cached blocks; under "keep" running requests are then computed again.

        Raises:
            ValueError: if there is no such mode.
            RuntimeError: if `resume_generation` came before the requests that were waited for had ended.
        """
        self._start_output_handler()
        await self.engine_core.pause(mode, clear_cache)

    async def resume_generation(self) -> None:
        """End a pause. Raises ValueError while the engine sleeps."""
        await self.engine_core.resume()

    async def is_paused(self) -> bool:
        """Whether no steps are taken: paused or asleep."""
        return await self.engine_core.is_paused()

    async def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Pause, and give the devices' memory back. Returns when it is done.

        Args:
            level: 0 only pauses. 1 moves the weights to host memory and drops the KV cache. 2 drops both; `wake_up` loads the
                weights again.
            mode: as for `pause_generation`.

        Raises:
            ValueError: if there is no such level or mode.
        """
        self._start_output_handler()
        await self.engine_core.sleep(level, mode)

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Undo `sleep`. Requests run again once everything is awake.

        Args:
            tags: what to wake: of "weights", "kv_cache" and "scheduling"; None for all.

        Raises:
            ValueError: if there is no such tag.
        """
        await self.engine_core.wake_up(tags)

    async def is_sleeping(self) -> bool:
        """Whether anything is asleep."""
        return await self.engine_core.is_sleeping()

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all cached blocks; see EngineCore.reset_prefix_cache."""
        return await self.engine_core.reset_prefix_cache(reset_running_requests)

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of every worker; see Executor.collective_rpc."""
        return await self.engine_core.collective_rpc(method, timeout, args, kwargs)

    async def get_stats(self) -> SchedulerStats:
        """The requests and the KV cache now, asked of the engine core."""
        return await self.engine_core.get_stats()

    def get_tokenizer(self) -> "PreTrainedTokenizerFast":
        """
        Raises:
            ValueError: if the engine has none.
        """
        if self.tokenizer is None:
            raise ValueError("the engine has no tokenizer: it was started with skip_tokenizer_init=True")
        return self.tokenizer

    def get_metrics(self) -> list[Metric]:
        """Totals since the start; of several engine cores each has its own, labelled `engine`.

        Raises:
            ValueError: if the engine keeps no statistics.
        """
        if not self.metrics:
            raise ValueError("the engine keeps no statistics: it was started with disable_log_stats=True")
        if self._is_one_of_several and isinstance(self.engine_core, DPLBAsyncMPClient):
            # A step tells one front end only what the engine core has to do; the coordinator tells all.
            for metrics, load in zip(self.metrics, self.engine_core.loads, strict=True):
                if load is not None:
                    metrics.num_requests_waiting.value = load.waiting
                    metrics.num_requests_running.value = load.running
                    metrics.kv_cache_usage.value = load.kv_cache_usage
        # Those of one name together.
        return [metric for group in zip(*(one.snapshot() for one in self.metrics), strict=True) for metric in group]

    async def drain(self, timeout: float) -> None:
        """Take no more requests, wait at most `timeout` seconds for the end of those that there are, then abort the rest.

        `shutdown` comes next.
        """
        self._is_draining = True
        deadline = time.monotonic() + timeout
        while self.output_processor.num_unfinished_requests and not self.errored and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        self._abort(list(self.output_processor.internal_ids), internal=False)

    def shutdown(self) -> None:
        """End the engine core and its process; open streams end with EngineDeadError. May be called more than once.

        From the event loop, or after it has ended.
        """
        self._is_draining = True
        self.engine_core.shutdown()
        self._tokenizer_threads.shutdown(wait=False, cancel_futures=True)
        if self._output_handler is not None and not self._output_handler.get_loop().is_closed():
            self._output_handler.cancel()
        self.output_processor.fail_all(str(self.dead_error))
        if self._trace is not None:
            self._trace.close()


def _num_chars(prompt: object) -> int:
    """Of a prompt of text; 0 for token ids, and for what is no prompt."""
    if isinstance(prompt, Mapping):
        prompt = None if "prompt_token_ids" in prompt else prompt.get("prompt")
    return len(prompt) if isinstance(prompt, str) else 0
