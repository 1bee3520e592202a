"""EngineCoreOutputs to RequestOutputs: text, stop strings, log probabilities, statistics."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from jaxllm.core.types import EngineCoreOutput, EngineCoreRequest, FinishReason
from jaxllm.engine.detokenizer import IncrementalDetokenizer, WholeTexts
from jaxllm.engine.errors import EngineDeadError, RequestFailedError
from jaxllm.engine.logprobs import LogprobsProcessor, TokenTexts
from jaxllm.engine.metrics import IterationStats, finished_request_stats
from jaxllm.engine.parallel_sampling import ParentRequest
from jaxllm.outputs import CompletionOutput, RequestOutput, RequestStateStats
from jaxllm.sampling_params import RequestOutputKind

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class OutputQueue(Protocol):
    """Where the outputs of a streamed request go. `put` must not block."""

    def put(self, item: RequestOutput | Exception) -> None: ...


@dataclass(slots=True)
class OutputProcessorOutput:
    """
    Attributes:
        request_outputs: of the requests that have no queue.
        reqs_to_abort: internal ids of requests that a stop string ended, which the engine core does not know yet.
    """

    request_outputs: list[RequestOutput] = field(default_factory=list)
    reqs_to_abort: list[str] = field(default_factory=list)


class RequestState:
    """What the front end keeps of a request until it ends.

    Attributes:
        external_id: as the caller gave it.
        parent: if the request is one of n.
        is_prefilling: until the first output.
        is_simple: a stream of one choice without log probabilities, whose outputs go out as they come.
        num_sent_tokens: how many have been in an output of a stream.
    """

    __slots__ = (
        "detokenizer",
        "external_id",
        "index",
        "is_delta",
        "is_final_only",
        "is_prefilling",
        "is_simple",
        "logprobs",
        "max_tokens",
        "num_cached_tokens",
        "num_sent_tokens",
        "parent",
        "prompt",
        "prompt_token_ids",
        "queue",
        "request_id",
        "stats",
        "stream_interval",
    )

    def __init__(
        self,
        request: EngineCoreRequest,
        external_id: str,
        prompt: str | None,
        parent: ParentRequest | None,
        index: int,
        queue: OutputQueue | None,
        detokenizer: IncrementalDetokenizer,
        logprobs: LogprobsProcessor | None,
        stream_interval: int,
        stats: RequestStateStats | None,
    ) -> None:
        params = request.sampling_params
        self.request_id = request.request_id
        self.external_id = external_id
        self.prompt = prompt
        self.prompt_token_ids = request.prompt_token_ids
        self.parent = parent
        self.index = index
        self.queue = queue
        self.detokenizer = detokenizer
        self.logprobs = logprobs
        self.is_delta = params.output_kind is RequestOutputKind.DELTA
        self.is_final_only = params.output_kind is RequestOutputKind.FINAL_ONLY
        self.max_tokens = params.max_tokens
        self.stream_interval = max(stream_interval, params.stream_interval or 1)
        self.stats = stats
        self.is_simple = self.is_delta and parent is None and logprobs is None and self.stream_interval == 1
        self.is_prefilling = True
        self.num_cached_tokens = 0
        self.num_sent_tokens = 0

    def make_request_output(
        self, finish_reason: FinishReason | None, stop_reason: int | str | None = None
    ) -> RequestOutput | None:
        """What to send after a step; None if nothing is due.

        A stream gets its first token and its end at once, what is between in portions of `stream_interval` tokens.
        """
        finished = finish_reason is not None
        if not finished:
            if self.is_final_only:
                return None
            num_new_tokens = len(self.detokenizer.token_ids) - self.num_sent_tokens
            if self.num_sent_tokens and num_new_tokens < self.stream_interval:
                return None
        outputs = [self._make_completion_output(finish_reason, stop_reason)]
        if self.parent is not None:
            outputs = self.parent.add_output(self.request_id, outputs[0])
            if not outputs:
                return None
            finished = not self.parent.unfinished
        prompt_logprobs = None
        if self.logprobs is not None:
            prompt_logprobs = self.logprobs.take_prompt_logprobs() if self.is_delta else self.logprobs.prompt_logprobs
        return RequestOutput(
            self.external_id,
            self.prompt,
            self.prompt_token_ids,
            prompt_logprobs,
            outputs,
            finished,
            self.stats,
            self.num_cached_tokens,
        )

    def _make_completion_output(self, finish_reason: FinishReason | None, stop_reason: int | str | None) -> CompletionOutput:
        finished = finish_reason is not None
        token_ids = self.detokenizer.token_ids
        num_tokens = len(token_ids)
        logprobs = cumulative_logprob = None
        if self.logprobs is not None and self.logprobs.logprobs is not None:
            logprobs, cumulative_logprob = self.logprobs.logprobs, self.logprobs.cumulative_logprob
        if self.is_delta or not finished:  # a copy: what has been given away does not change any more
            start = self.num_sent_tokens if self.is_delta else 0
            token_ids = token_ids[start:]
            logprobs = logprobs[start:] if logprobs is not None else None
        self.num_sent_tokens = num_tokens
        return CompletionOutput(
            self.index,
            self.detokenizer.get_next_output_text(finished, self.is_delta),
            token_ids,
            cumulative_logprob,
            logprobs,
            str(finish_reason) if finish_reason is not None else None,
            stop_reason,
        )


class OutputProcessor:
    """Knows all unfinished requests of a front end.

    Args:
        tokenizer: None to make no text.
        stream_interval: tokens between two outputs of a stream; a request can only raise it.

    Attributes:
        num_queued_tokens: prompt tokens of the requests that have given no output yet.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerFast | None", log_stats: bool, stream_interval: int = 1) -> None:
        self.tokenizer = tokenizer
        self.token_texts = TokenTexts(tokenizer) if tokenizer is not None else None
        self.whole_texts = WholeTexts.both_of(tokenizer)
        self.log_stats = log_stats
        self.stream_interval = stream_interval
        self.num_queued_tokens = 0
        self.request_states: dict[str, RequestState] = {}
        self.parents: dict[str, ParentRequest] = {}
        self.internal_ids: dict[str, list[str]] = {}  # of each external id: internal ids of requests or of parents

    @property
    def num_unfinished_requests(self) -> int:
        return len(self.request_states)

    def add_request(
        self,
        request: EngineCoreRequest,
        external_id: str,
        prompt: str | None,
        parent: ParentRequest | None = None,
        index: int = 0,
        queue: OutputQueue | None = None,
    ) -> None:
        """Expect outputs of `request`. Must come before the engine core hears of it.

        Args:
            external_id: the id that outputs carry.
            prompt: its text, if known.
            parent, index: if it is one of n.
            queue: takes the outputs; without one `process_outputs` returns them.
        """
        assert request.request_id not in self.request_states, f"request id {request.request_id} is in use"
        self.request_states[request.request_id] = RequestState(
            request,
            external_id,
            prompt,
            parent,
            index,
            queue,
            IncrementalDetokenizer.from_new_request(self.tokenizer, request, self.whole_texts),
            LogprobsProcessor.from_new_request(self.token_texts, request),
            self.stream_interval,
            RequestStateStats(arrival_time=request.arrival_time) if self.log_stats else None,
        )
        self.num_queued_tokens += len(request.prompt_token_ids)
        internal_id = request.request_id
        if parent is not None:
            parent.unfinished.add(request.request_id)
            if parent.request_id in self.parents:
                return
            internal_id = parent.request_id
            self.parents[internal_id] = parent
        self.internal_ids.setdefault(external_id, []).append(internal_id)

    def abort_requests(self, request_ids: Iterable[str], internal: bool = False) -> list[str]:
        """Forget requests. Queues get a last output with finish reason "abort".

        Args:
            request_ids: external ids, or internal ones of requests or parents. Unknown ones are ignored: they have ended.

        Returns:
            Internal ids that the engine core must abort.
        """
        ids = list(request_ids)
        if not internal:
            ids = [internal_id for external_id in ids for internal_id in self.internal_ids.get(external_id, [])]
        aborted = []
        for request_id in ids:
            parent = self.parents.get(request_id)
            for child_id in sorted(parent.unfinished) if parent is not None else [request_id]:
                state = self.request_states.get(child_id)
                if state is None:
                    continue
                if state.queue is not None and (output := state.make_request_output(FinishReason.ABORT)) is not None:
                    state.queue.put(output)
                self._forget(state)
                aborted.append(child_id)
        return aborted

    def process_outputs(
        self, outputs: Iterable[EngineCoreOutput], timestamp: float = 0.0, iteration: IterationStats | None = None
    ) -> OutputProcessorOutput:
        """Process a step, in one loop over its outputs: this runs for every token of every request.

        Args:
            timestamp: `time.monotonic()` of the engine core at the end of the step.
            iteration: counts the step.
        """
        result = OutputProcessorOutput()
        request_states, request_outputs, stop = self.request_states, result.request_outputs, FinishReason.STOP
        for output in outputs:
            state = request_states.get(output.request_id)
            if state is None:
                continue  # aborted while the step ran
            finish_reason, stop_reason = output.finish_reason, output.stop_reason
            detokenizer = state.detokenizer
            token_ids = detokenizer.token_ids
            num_tokens = len(token_ids)
            stop_string = detokenizer.update(output.new_token_ids, finish_reason is stop)
            num_new_tokens = len(token_ids) - num_tokens
            if stop_string is not None:
                finish_reason, stop_reason = stop, stop_string
            if iteration is not None and output.new_token_ids:  # a request that the engine core gave up has none
                assert state.stats is not None
                iteration.update(state.stats, output, num_new_tokens, timestamp, state.prompt_token_ids, state.is_prefilling)
            if state.is_prefilling:
                state.is_prefilling = False
                self.num_queued_tokens -= len(state.prompt_token_ids)
                state.num_cached_tokens = output.num_cached_tokens
            elif state.is_simple and finish_reason is None:
                # Nearly all outputs of a stream, for which make_request_output does just this.
                text = detokenizer.get_next_output_text(False, True)
                state.num_sent_tokens = num_tokens + num_new_tokens
                request_output = RequestOutput(
                    state.external_id,
                    state.prompt,
                    state.prompt_token_ids,
                    None,
                    [CompletionOutput(state.index, text, token_ids[num_tokens:])],
                    False,
                    state.stats,
                    state.num_cached_tokens,
                )
                if state.queue is None:
                    request_outputs.append(request_output)
                else:
                    state.queue.put(request_output)
                continue
            if state.logprobs is not None:
                state.logprobs.update(output, num_new_tokens)
            request_output = state.make_request_output(finish_reason, stop_reason)
            if request_output is not None:
                if state.queue is None:
                    request_outputs.append(request_output)
                elif finish_reason is not FinishReason.ERROR:
                    state.queue.put(request_output)
            if finish_reason is not None:
                self._finish(state, finish_reason, stop_reason, iteration)
                if not output.finished:
                    result.reqs_to_abort.append(state.request_id)
        return result

    def _finish(
        self, state: RequestState, reason: FinishReason, stop_reason: int | str | None, iteration: IterationStats | None
    ) -> None:
        if reason is FinishReason.ERROR and state.queue is not None:
            why = "" if stop_reason is None else f": {stop_reason}"
            state.queue.put(RequestFailedError(f"request {state.external_id} failed in the engine{why}"))
        self._forget(state)
        if iteration is not None:
            self._count_finished(state, reason, iteration)

    def restart_request(self, request: EngineCoreRequest) -> bool:
        """Forget what has come of a request, since it begins again in another engine core.

        Returns:
            False, and nothing is done, if it has ended, or its caller has got a part of its output already.
        """
        state = self.request_states.get(request.request_id)
        if state is None or state.num_sent_tokens:
            return False
        if not state.is_prefilling:
            state.is_prefilling = True
            self.num_queued_tokens += len(state.prompt_token_ids)
        state.detokenizer = IncrementalDetokenizer.from_new_request(self.tokenizer, request, self.whole_texts)
        state.logprobs = LogprobsProcessor.from_new_request(self.token_texts, request)
        state.num_cached_tokens = 0
        if state.stats is not None:
            state.stats = RequestStateStats(arrival_time=request.arrival_time)
        return True

    def fail_all(self, why: str) -> None:
        """Forget all requests, since the engine core is dead; each queue gets an EngineDeadError."""
        self.fail(list(self.request_states), lambda: EngineDeadError(why))

    def fail(self, request_ids: Iterable[str], make_error: Callable[[], Exception]) -> None:
        """Forget requests, by their internal ids; each queue gets an error. Unknown ones are ignored."""
        for request_id in request_ids:
            state = self.request_states.get(request_id)
            if state is None:
                continue
            if state.queue is not None:
                state.queue.put(make_error())
            self._forget(state)

    def _forget(self, state: RequestState) -> None:
        del self.request_states[state.request_id]
        if state.is_prefilling:
            self.num_queued_tokens -= len(state.prompt_token_ids)
        ended = state.request_id
        if state.parent is not None:
            state.parent.unfinished.discard(state.request_id)
            if state.parent.unfinished:
                return
            ended = state.parent.request_id
            del self.parents[ended]
        internal_ids = self.internal_ids[state.external_id]
        internal_ids.remove(ended)
        if not internal_ids:
            del self.internal_ids[state.external_id]

    def _count_finished(self, state: RequestState, reason: FinishReason, iteration: IterationStats) -> None:
        assert state.stats is not None
        iteration.finished_requests.append(
            finished_request_stats(
                reason, state.stats, len(state.prompt_token_ids), state.num_cached_tokens, state.max_tokens, time.time()
            )
        )
        num_tokens, n = state.stats.num_generation_tokens, 1
        if state.parent is not None:
            num_tokens = state.parent.max_num_generation_tokens = max(num_tokens, state.parent.max_num_generation_tokens)
            if state.parent.unfinished:
                return
            n = state.parent.params.n
        iteration.max_num_generation_tokens.append(num_tokens)
        iteration.n.append(n)
