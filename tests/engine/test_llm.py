"""The offline API over a toy model."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from toy_engine import (
    check_idle,
    executor_of,
    expected_tokens,
    make_config,
    make_engine,
    scheduler_of,
    scripted,
)
from transformers import PreTrainedTokenizerFast

import jaxllm
from jaxllm.engine.errors import EngineDeadError
from jaxllm.llm import LLM
from jaxllm.outputs import RequestOutput
from jaxllm.sampling_params import SamplingParams


@pytest.fixture
def llm(tokenizer: PreTrainedTokenizerFast) -> LLM:
    return LLM.from_engine(make_engine(tokenizer=tokenizer))


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_order_is_that_of_the_prompts(llm: LLM, tokenizer: PreTrainedTokenizerFast) -> None:
    prompts = [f"hello {i}" for i in range(12)]
    params = [SamplingParams(max_tokens=12 - i, output_kind=jaxllm.RequestOutputKind.DELTA) for i in range(12)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.prompt for output in outputs] == prompts
    assert tokens_of(outputs) == [expected_tokens(tokenizer.encode(prompt), 12 - i) for i, prompt in enumerate(prompts)]
    assert all(output.finished for output in outputs)
    assert params[0].output_kind is jaxllm.RequestOutputKind.DELTA  # the caller's own
    check_idle(llm.engine)


@pytest.mark.parametrize(
    ("prompts", "num_outputs"),
    [
        ("hello", 1),
        ([5, 6], 1),
        ({"prompt": "hello"}, 1),
        ({"prompt_token_ids": [5]}, 1),
        ([], 0),
        (["hello", [5, 6], {"prompt": "a"}, {"prompt_token_ids": [5]}], 4),
    ],
)
def test_forms_of_prompts(llm: LLM, prompts: Any, num_outputs: int) -> None:
    outputs = llm.generate(prompts, SamplingParams(max_tokens=2), use_tqdm=False)
    assert [len(tokens) for tokens in tokens_of(outputs)] == [2] * num_outputs


def test_default_sampling_params(tokenizer: PreTrainedTokenizerFast) -> None:
    config = make_config(generation_defaults={"temperature": 0.25, "top_k": 7, "max_tokens": 3})
    llm = LLM.from_engine(make_engine(config, tokenizer=tokenizer))
    default = llm.get_default_sampling_params()
    assert (default.temperature, default.top_k, default.max_tokens) == (0.25, 7, 3)
    assert llm.get_default_sampling_params() is not default
    assert len(llm.generate("hello", use_tqdm=False)[0].outputs[0].token_ids) == 3
    assert LLM.from_engine(make_engine()).get_default_sampling_params() == SamplingParams()


def test_n_in_one_output(llm: LLM, tokenizer: PreTrainedTokenizerFast) -> None:
    (output,) = llm.generate("hello", SamplingParams(n=3, max_tokens=2), use_tqdm=False)
    assert [completion.token_ids for completion in output.outputs] == [expected_tokens(tokenizer.encode("hello"), 2)] * 3


@pytest.mark.parametrize(
    ("prompts", "arguments", "message"),
    [
        (["a", "b"], {"sampling_params": [SamplingParams()]}, "sampling_params must be .* for each of the 2 prompts, got 1"),
        ("a", {"sampling_params": [SamplingParams()] * 2}, "for each of the 1 prompts, got 2"),
        (["a", "b"], {"priority": [1]}, "priority must be .* for each of the 2 prompts, got 1"),
        (["a", ""], {}, "prompt must not be empty"),
        (["a", [5] * 64], {}, "maximum model length of 64"),
        (["a", "b"], {"sampling_params": [SamplingParams(), SamplingParams(logprobs=21)]}, "logprobs must be at most 20"),
        (["a", "b"], {"priority": [0, 1]}, "priority must be 0"),
        (["a", "b"], {"sampling_params": [SamplingParams(), None]}, "sampling_params must be SamplingParams, got None"),
        (5, {}, "prompts must be a prompt or a list of prompts, got 5"),
    ],
)
def test_one_mistake_and_nothing_is_queued(llm: LLM, prompts: Any, arguments: dict[str, Any], message: str) -> None:
    for call in (llm.generate, llm.enqueue):
        with pytest.raises(ValueError, match=message):
            call(prompts, **arguments)
    check_idle(llm.engine)
    assert llm.wait_for_completion(use_tqdm=False) == []


def test_priority(tokenizer: PreTrainedTokenizerFast) -> None:
    llm = LLM.from_engine(make_engine(make_config(policy="priority", max_num_seqs=1), tokenizer=tokenizer))
    order: list[int] = []
    executor_of(llm.engine).during_step = lambda output: order.extend(
        request.token_ids[0] for request in output.scheduled_new_reqs
    )
    llm.generate([[5], [6], [7]], SamplingParams(max_tokens=1), priority=[3, 1, 2], use_tqdm=False)
    assert order == [6, 7, 5]
    llm.generate([[5], [6]], SamplingParams(max_tokens=1), priority=4, use_tqdm=False)


def test_enqueue_and_wait(llm: LLM) -> None:
    """Enqueued requests run beside a `generate`, whose outputs are its own."""
    first = llm.enqueue([[5], [6]], SamplingParams(max_tokens=2))
    second = llm.enqueue([7], SamplingParams(max_tokens=30))
    assert len({*first, *second}) == 3
    assert tokens_of(llm.generate([[8]], SamplingParams(max_tokens=5), use_tqdm=False)) == [expected_tokens([8], 5)]
    assert llm.engine.get_num_unfinished_requests() == 1
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [output.request_id for output in outputs] == [*first, *second]
    assert tokens_of(outputs) == [expected_tokens([5], 2), expected_tokens([6], 2), expected_tokens([7], 30)]
    assert llm.wait_for_completion(use_tqdm=False) == []
    check_idle(llm.engine)


class Bar:
    """Takes the place of tqdm."""

    made: list["Bar"]

    def __init__(self, total: int, desc: str, **more: Any) -> None:
        self.total, self.done, self.closed, self.postfixes = total, 0, False, [more["postfix"]]
        Bar.made.append(self)

    def set_postfix_str(self, text: str, refresh: bool) -> None:
        self.postfixes.append(text)

    def update(self, count: int) -> None:
        self.done += count

    def close(self) -> None:
        self.closed = True


def test_progress(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    Bar.made = []
    llm.generate([[5], [6], [7]], SamplingParams(max_tokens=2), use_tqdm=Bar)
    (bar,) = Bar.made
    assert (bar.total, bar.done, bar.closed) == (3, 3, True)
    assert bar.postfixes[0] == "input: 0.00 tokens/s, output: 0.00 tokens/s"
    assert len(bar.postfixes) == 4
    assert bar.postfixes[1] != bar.postfixes[0]
    llm.generate([5], SamplingParams(max_tokens=2))
    err = capsys.readouterr().err
    assert "Processed prompts: 100%" in err
    assert "tokens/s" in err
    llm.generate([5], SamplingParams(max_tokens=2), use_tqdm=False)
    assert capsys.readouterr().err == ""


def interrupt_once(llm: LLM, times: int) -> Callable[[Any], None]:
    """Ctrl-C, so many times, during the third step."""
    steps = []

    def during_step(output: Any) -> None:
        steps.append(output)
        if len(steps) == 3:
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)

    return during_step


def test_interrupt_aborts_what_the_call_queued_and_the_engine_lives(llm: LLM) -> None:
    (enqueued,) = llm.enqueue([5], SamplingParams(max_tokens=20))
    executor_of(llm.engine).during_step = interrupt_once(llm, 1)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[6]] * 20, SamplingParams(max_tokens=20), use_tqdm=False)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert llm.engine.get_num_unfinished_requests() == 1
    assert len(scheduler_of(llm.engine).requests) == 1
    (output,) = llm.wait_for_completion(use_tqdm=False)
    assert (output.request_id, tokens_of([output])) == (enqueued, [expected_tokens([5], 20)])
    assert tokens_of(llm.generate([[6]], SamplingParams(max_tokens=4), use_tqdm=False)) == [expected_tokens([6], 4)]
    check_idle(llm.engine)


def test_interrupt_twice_does_not_wait(llm: LLM) -> None:
    executor_of(llm.engine).during_step = interrupt_once(llm, 2)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[6]], SamplingParams(max_tokens=20), use_tqdm=False)
    with pytest.raises(EngineDeadError, match="KeyboardInterrupt"):
        llm.generate([[6]], SamplingParams(max_tokens=20), use_tqdm=False)


def test_interrupt_while_waiting_aborts_what_was_enqueued(llm: LLM) -> None:
    llm.enqueue([[5], [6]], SamplingParams(max_tokens=20))
    executor_of(llm.engine).during_step = interrupt_once(llm, 1)
    with pytest.raises(KeyboardInterrupt):
        llm.wait_for_completion(use_tqdm=False)
    assert llm.wait_for_completion(use_tqdm=False) == []
    check_idle(llm.engine)


def test_error_in_the_front_end_aborts_and_the_engine_lives(llm: LLM) -> None:
    class BadBar(Bar):
        def update(self, count: int) -> None:
            raise OSError("no space")

    Bar.made = []
    with pytest.raises(OSError, match="no space"):
        llm.generate([[5], [6], [7]], [SamplingParams(max_tokens=n) for n in (2, 9, 9)], use_tqdm=BadBar)
    assert Bar.made[0].closed
    check_idle(llm.engine)
    assert tokens_of(llm.generate([[6]], SamplingParams(max_tokens=4), use_tqdm=False)) == [expected_tokens([6], 4)]
    assert llm._finished == {}


def test_dead_engine(llm: LLM) -> None:
    def fail(output: Any) -> None:
        raise MemoryError("device")

    executor_of(llm.engine).during_step = fail
    with pytest.raises(EngineDeadError, match="device"):
        llm.generate([[5]] * 3, use_tqdm=False)
    with pytest.raises(EngineDeadError, match="device"):
        llm.generate([[5]], use_tqdm=False)
    assert not llm.engine.has_unfinished_requests()


def test_from_another_thread(llm: LLM) -> None:
    """Where Ctrl-C does not arrive and handlers cannot be set."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.extend(llm.generate([[5]], SamplingParams(max_tokens=2), use_tqdm=False)))
    thread.start()
    thread.join()
    assert tokens_of(results) == [expected_tokens([5], 2)]


def test_other_handlers_are_left_alone(llm: LLM) -> None:
    seen = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        executor_of(llm.engine).during_step = interrupt_once(llm, 1)
        llm.generate([[5]], SamplingParams(max_tokens=5), use_tqdm=False)
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [signal.SIGINT]


def test_chat(llm: LLM, tokenizer: PreTrainedTokenizerFast) -> None:
    pytest.importorskip("jaxllm.tokenizer")
    conversation = [{"role": "user", "content": "hello"}]
    other = [*conversation, {"role": "assistant", "content": "a"}]
    text = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    (output,) = llm.chat(conversation, SamplingParams(max_tokens=2), use_tqdm=False)
    assert output.prompt == text
    assert output.prompt_token_ids == tokenizer.encode(text)
    assert output.prompt_token_ids[0] == 1
    outputs = llm.chat([conversation, other], SamplingParams(max_tokens=2), use_tqdm=False)
    assert [one.prompt for one in outputs] == [text, text.removesuffix("assistant\n") + "assistant\na<|im_end|>\n" + text[-22:]]
    (bare,) = llm.chat(conversation, add_generation_prompt=False, use_tqdm=False)
    assert bare.prompt == "<|im_start|>user\nhello<|im_end|>\n"
    (going_on,) = llm.chat(other, add_generation_prompt=False, continue_final_message=True, use_tqdm=False)
    assert going_on.prompt == text + "a"
    (own,) = llm.chat(
        conversation,
        chat_template="{{ messages[0]['content'] }} {{ tools[0]['name'] }} {{ more }}",
        tools=[{"name": "f"}],
        chat_template_kwargs={"more": "x"},
        use_tqdm=False,
    )
    assert own.prompt == "hello f x"


def test_chat_mistakes(llm: LLM) -> None:
    pytest.importorskip("jaxllm.tokenizer")
    with pytest.raises(ValueError, match="continue_final_message=True needs add_generation_prompt=False"):
        llm.chat([{"role": "user", "content": "a"}], continue_final_message=True)
    for messages in ([], "hello", {"role": "user", "content": "a"}):
        with pytest.raises(ValueError, match="messages must be a list of messages"):
            llm.chat(messages)  # type: ignore[arg-type]
    check_idle(llm.engine)


def test_the_rest(llm: LLM, tokenizer: PreTrainedTokenizerFast) -> None:
    assert llm.get_tokenizer() is tokenizer
    llm.generate([5] * 9, SamplingParams(max_tokens=2), use_tqdm=False)
    assert {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}["jaxllm:generation_tokens"] == 2
    assert llm.reset_prefix_cache()
    assert llm.collective_rpc("describe", args=("x",))[0][0] == "x"


def test_context_manager(tokenizer: PreTrainedTokenizerFast) -> None:
    with LLM.from_engine(make_engine(tokenizer=tokenizer)) as llm:
        executor = executor_of(llm.engine)
        assert executor.num_shutdowns == 0
    assert executor.num_shutdowns == 1
    with pytest.raises(EngineDeadError, match="shut down"):
        llm.generate([5], use_tqdm=False)


def test_unknown_argument_names_the_nearest() -> None:
    pytest.importorskip("jaxllm.weights")
    with pytest.raises(TypeError, match="unknown argument 'max_model_length'; did you mean 'max_model_len'"):
        LLM("smollm2-135m-instruct", max_model_length=5)


def test_import_is_quick_and_starts_nothing() -> None:
    code = (
        "import sys, time; start = time.perf_counter(); import jaxllm; seconds = time.perf_counter() - start; "
        "loaded = {'jax', 'transformers', 'torch', 'numpy'} & set(sys.modules); "
        "assert seconds < 0.2 and not loaded, (seconds, loaded); "
        "from jaxllm import LLM, SamplingParams, RequestOutput, CompletionOutput, RequestOutputKind; "
        "loaded = {'jax', 'transformers', 'torch'} & set(sys.modules); assert not loaded, loaded; "
        "assert set(jaxllm.__all__) <= set(dir(jaxllm))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    with pytest.raises(AttributeError, match="no attribute 'Missing'"):
        _ = jaxllm.Missing


def test_scripted_answer_in_text(tokenizer: PreTrainedTokenizerFast) -> None:
    answer = tokenizer.encode("world, hello.")
    llm = LLM.from_engine(make_engine(tokenizer=tokenizer, next_token=scripted({tuple(tokenizer.encode("hello")): answer})))
    start = time.time()
    (output,) = llm.generate("hello", SamplingParams(max_tokens=len(answer), stop="."), use_tqdm=False)
    assert output.outputs[0].text == "world, hello"
    assert output.metrics is not None
    assert start <= output.metrics.arrival_time <= time.time()
