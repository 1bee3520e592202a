from collections.abc import Callable, Iterator
from typing import Any

import pytest
from child_engine import is_alive, make_async_llm
from toy_engine import make_tokenizer
from transformers import PreTrainedTokenizerFast

from jaxllm.engine.async_llm import AsyncLLM


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture
def make(tokenizer: PreTrainedTokenizerFast) -> Iterator[Callable[..., AsyncLLM]]:
    """AsyncLLMs of a test's own, which it may break."""
    made: list[AsyncLLM] = []

    def make_one(**config: Any) -> AsyncLLM:
        made.append(make_async_llm(tokenizer, **config))
        return made[-1]

    yield make_one
    for one in made:
        one.shutdown()
        assert not is_alive(one.engine_core.pid)
