"""Executors of toy models that say what they are told to. Apart from the server, so that the engine's process starts quickly."""

import functools
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

from toy_engine import IM_END, ToyExecutor, hash_next, make_backend_tokenizer

from jaxllm.core.kv_cache_interface import KVCacheConfig
from jaxllm.core.output import ModelRunnerOutput, SchedulerOutput

OPEN, CLOSE = "SAY[", "]YAS"


_backend = functools.cache(make_backend_tokenizer)


@functools.lru_cache
def _script(prompt: tuple[int, ...]) -> tuple[int, ...]:
    """What a chat prompt tells the model to say, word for word; nothing if it does not."""
    text = _backend().decode(prompt, skip_special_tokens=False)
    if OPEN not in text:
        return ()
    answer = text.rpartition(OPEN)[2].partition(CLOSE)[0]
    return (*_backend().encode(answer).ids, IM_END)


@functools.cache
def _opening() -> tuple[int, ...]:
    return tuple(_backend().encode("<|im_start|>assistant\n").ids)


def say(context: tuple[int, ...]) -> int:
    """A model that says what a chat prompt holds between SAY[ and ]YAS, and else follows the hash of the context."""
    opening = _opening()
    for start in range(len(context) - len(opening), -1, -1):
        if context[start : start + len(opening)] == opening:
            end = start + len(opening)
            script = _script(context[:end])
            return script[len(context) - end] if len(context) - end < len(script) else hash_next(context)
    return hash_next(context)


class SayingExecutor(ToyExecutor):
    next_token = staticmethod(say)


class BrokenExecutor(ToyExecutor):
    def initialize(self) -> KVCacheConfig:
        raise RuntimeError("the device is on fire")


class ImpossibleExecutor(ToyExecutor):
    def initialize(self) -> KVCacheConfig:
        raise ValueError("the device is on fire")


class SlowExecutor(SayingExecutor):
    """Takes 20 ms a step."""

    delay = 0.02

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        time.sleep(self.delay)
        return super().execute_model(scheduler_output)
