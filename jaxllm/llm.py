"""LLM: the offline API. Many prompts in, their outputs back in the same order."""

import itertools
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from tqdm import tqdm

from jaxllm.beam_search import BeamSearchOutput, BeamSearchParams, beam_search
from jaxllm.engine.core import PauseMode
from jaxllm.engine.input_processor import Prompt, TokensPrompt, as_prompt_list
from jaxllm.engine.llm_engine import LLMEngine
from jaxllm.engine.metrics import Metric
from jaxllm.outputs import RequestOutput
from jaxllm.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Message = Mapping[str, Any]


class LLM:
    """A model, ready to generate.

        with LLM("smollm2-135m-instruct") as llm:
            for output in llm.generate(["Hello", "The capital of France is"]):
                print(output.outputs[0].text)

    One thread at a time may use it.

    Args:
        model: a folder, a .gguf file, a hub id, or "smollm2-135m-instruct".
        multiprocess: run the engine core in a process of its own; this one then never imports jax.
        kwargs: the other fields of EngineArgs.

    Raises:
        TypeError: for an unknown keyword argument, naming the nearest known one.
        ValueError: naming the argument and its value.
        EngineStartError: if the engine core's process does not become ready.
    """

    def __init__(self, model: str, *, multiprocess: bool = False, **kwargs: Any) -> None:
        from jaxllm.engine.engine_args import EngineArgs

        args = EngineArgs.from_kwargs(model=model, **kwargs)
        self._start(LLMEngine.from_engine_args(args, multiprocess=multiprocess))

    @classmethod
    def from_engine(cls, engine: LLMEngine) -> Self:
        """An LLM over an engine that exists already and that nobody else steps."""
        llm = cls.__new__(cls)
        llm._start(engine)
        return llm

    def _start(self, engine: LLMEngine) -> None:
        self.engine = engine
        self._next_id = itertools.count()
        self._enqueued: list[str] = []
        self._finished: dict[str, RequestOutput] = {}  # of enqueued requests

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Generate for all prompts and wait for the last.

        Args:
            prompts: one or a list. A prompt is text, a list of token ids, or a TextPrompt or TokensPrompt dict.
            sampling_params: for all prompts, or one for each; None for `get_default_sampling_params()`.
            use_tqdm: show a progress bar; or what to use instead of `tqdm.tqdm`.
            priority: for all prompts, or one for each; lower is served first. Only under the priority policy.

        Returns:
            One RequestOutput a prompt, in the order of the prompts.

        Raises:
            ValueError: naming what is wrong with which prompt; nothing has been queued then.
            EngineDeadError: if the engine fails.
            KeyboardInterrupt: the step that runs is brought to its end first; interrupt twice not to wait for it. The requests
                of this call have been aborted and the engine can be used again, unless a step was cut short.
        """
        with self._aborted_on_error() as request_ids:
            self._queue(prompts, sampling_params, priority, request_ids)
            return self._run(request_ids, use_tqdm)

    def enqueue(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] | None = None,
    ) -> list[str]:
        """Like `generate`, but do not wait. They run during `wait_for_completion` and other calls.

        Returns:
            Their request ids.
        """
        with self._aborted_on_error() as request_ids:
            self._queue(prompts, sampling_params, priority, request_ids)
        self._enqueued += request_ids
        return request_ids

    def wait_for_completion(self, *, use_tqdm: bool | Callable[..., Any] = True) -> list[RequestOutput]:
        """Wait for all that was enqueued.

        Returns:
            The outputs of all requests enqueued since the last call, in the order of enqueueing.

        Raises:
            As `generate`; all that was enqueued has been aborted then.
        """
        with self._aborted_on_error() as request_ids:
            request_ids += self._enqueued
            self._enqueued = []
            return self._run(request_ids, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Generate the next message of conversations.

        Args:
            messages: one conversation, a list of `{"role": …, "content": …}`, or a list of conversations.
            chat_template: a Jinja template, instead of the model's own.
            add_generation_prompt: let the prompt end with the beginning of an assistant message.
            continue_final_message: let the model go on with the last message; needs `add_generation_prompt=False`.
            tools: descriptions of functions, for the template.
            chat_template_kwargs: more for the template.

        Returns:
            One RequestOutput a conversation, in order.

        Raises:
            ValueError: if the model has no chat template, or a conversation does not fit it; and as `generate`.
        """
        from jaxllm.tokenizer import apply_chat_template

        if add_generation_prompt and continue_final_message:
            raise ValueError("continue_final_message=True needs add_generation_prompt=False, got True")
        if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
            raise ValueError(f"messages must be a list of messages or a list of such lists, not empty, got {messages!r}")
        tokenizer = self.get_tokenizer()
        prompts: list[Prompt] = []
        for conversation in [messages] if isinstance(messages[0], Mapping) else messages:
            text = apply_chat_template(
                tokenizer,
                conversation,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template=chat_template,
                tools=tools,
                **(chat_template_kwargs or {}),
            )
            # The template writes the special tokens itself.
            token_ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            prompts.append(TokensPrompt(prompt_token_ids=token_ids, prompt=text))
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams, *, use_tqdm: bool = False
    ) -> list[BeamSearchOutput]:
        """The `beam_width` most probable continuations of each prompt; see BeamSearchParams."""
        return beam_search(self, as_prompt_list(prompts), params, use_tqdm)

    def get_tokenizer(self) -> "PreTrainedTokenizerFast":
        """The tokenizer. Raises ValueError if there is none."""
        return self.engine.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model recommends, a new object each time."""
        return SamplingParams.from_optional(**self.engine.config.model.generation_defaults)

    def get_metrics(self) -> list[Metric]:
        """Counters, gauges and histograms since the start. Raises ValueError if the engine keeps none."""
        return self.engine.get_metrics()

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all cached blocks. Returns whether it was done: not while blocks are in use."""
        return self.engine.reset_prefix_cache(reset_running_requests)

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of every worker and return the answers, by rank."""
        return self.engine.collective_rpc(method, timeout, args, kwargs)

    def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Give the devices' memory back until `wake_up`. Till then nothing is generated.

        Args:
            level: 0 frees nothing. 1 moves the weights to host memory and drops the KV cache. 2 drops both; `wake_up` loads the
                weights again.
            mode: what happens to enqueued prompts: "abort" ends them, "keep" lets them go on afterwards, "wait" runs them first,
                for which the engine core needs a process of its own.

        Raises:
            ValueError: if there is no such level or mode.
        """
        self.engine.sleep(level, mode)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Undo `sleep`.

        Args:
            tags: what to wake: of "weights", "kv_cache" and "scheduling"; None for all.
        """
        self.engine.wake_up(tags)

    def is_sleeping(self) -> bool:
        """Whether anything is asleep."""
        return self.engine.is_sleeping()

    def shutdown(self) -> None:
        """Free the devices. May be called more than once."""
        self.engine.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.shutdown()

    def _queue(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int | Sequence[int] | None,
        request_ids: list[str],
    ) -> None:
        """Check all, then queue all; `request_ids` gets the ids of those that are queued."""
        prompt_list = as_prompt_list(prompts)
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        params_list = _one_each("sampling_params", sampling_params, len(prompt_list))
        priorities = _one_each("priority", 0 if priority is None else priority, len(prompt_list))
        checked = []
        for prompt, params, one_priority in zip(prompt_list, params_list, priorities, strict=True):
            checked.append(self.engine.check_request(str(next(self._next_id)), prompt, params, priority=one_priority))
        for one in checked:
            one.request.sampling_params.output_kind = RequestOutputKind.FINAL_ONLY
            request_ids.append(one.request_id)
            self.engine.queue_request(one)

    @contextmanager
    def _aborted_on_error(self) -> Iterator[list[str]]:
        """Gives a list; the requests whose ids are in it are aborted if the block raises."""
        request_ids: list[str] = []
        try:
            yield request_ids
        except BaseException:
            self.engine.abort_request(request_ids)
            for request_id in request_ids:
                self._finished.pop(request_id, None)
            raise

    def _run(self, request_ids: list[str], use_tqdm: bool | Callable[..., Any]) -> list[RequestOutput]:
        """Step until all of these have ended, keeping what else ends meanwhile."""
        missing = {request_id for request_id in request_ids if request_id not in self._finished}
        if missing and self.engine.is_sleeping():
            raise RuntimeError("the engine is asleep: wake_up comes first")
        progress = _Progress(len(missing), use_tqdm) if use_tqdm and missing else None
        try:
            with _interrupts_deferred() as check_interrupt:
                while missing:
                    for output in self.engine.step():
                        self._finished[output.request_id] = output
                        if progress is not None and output.request_id in missing:
                            progress.add(output)
                        missing.discard(output.request_id)
                    check_interrupt()
        finally:
            if progress is not None:
                progress.close()
        return [self._finished.pop(request_id) for request_id in request_ids]


def _one_each(name: str, value: Any, count: int) -> Sequence[Any]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        return [value] * count
    if len(value) != count:
        raise ValueError(f"{name} must be one for all prompts or one for each of the {count} prompts, got {len(value)}")
    return value


@contextmanager
def _interrupts_deferred() -> Iterator[Callable[[], None]]:
    """Hold the first KeyboardInterrupt back until the function given is called: a step cut short leaves the device's state
    unknown and so costs the engine. The second one comes through at once.

    Only Python's own handler is replaced, and only in the main thread, where alone it acts.
    """
    if threading.current_thread() is not threading.main_thread() or (
        signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield lambda: None
        return
    interrupted = False

    def on_interrupt(number: int, frame: Any) -> None:
        nonlocal interrupted
        if interrupted:
            signal.default_int_handler(number, frame)
        interrupted = True

    def check() -> None:
        if interrupted:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


class _Progress:
    """A bar of finished prompts, with prompt and output tokens per second."""

    def __init__(self, total: int, make_bar: bool | Callable[..., Any]) -> None:
        make_bar = make_bar if callable(make_bar) else tqdm
        self.bar = make_bar(total=total, desc="Processed prompts", dynamic_ncols=True, postfix=self._speed(0, 0, 0.0))
        self.start = time.monotonic()
        self.num_prompt_tokens = self.num_output_tokens = 0

    @staticmethod
    def _speed(num_prompt_tokens: int, num_output_tokens: int, seconds: float) -> str:
        seconds = max(seconds, 1e-9)
        return f"input: {num_prompt_tokens / seconds:.2f} tokens/s, output: {num_output_tokens / seconds:.2f} tokens/s"

    def add(self, output: RequestOutput) -> None:
        self.num_prompt_tokens += len(output.prompt_token_ids) * len(output.outputs)
        self.num_output_tokens += sum(len(completion.token_ids) for completion in output.outputs)
        elapsed = time.monotonic() - self.start
        self.bar.set_postfix_str(self._speed(self.num_prompt_tokens, self.num_output_tokens, elapsed), refresh=False)
        self.bar.update(1)

    def close(self) -> None:
        self.bar.close()
