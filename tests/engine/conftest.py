import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from child_engine import is_alive, make_async_llm
from mp_clients import make_client
from toy_engine import make_tokenizer
from transformers import PreTrainedTokenizerFast

from jaxllm.engine.async_llm import AsyncLLM
from jaxllm.engine.mp_client import SyncMPClient


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


@pytest.fixture(scope="module")
def own_temp_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nobody else's sockets are in it. Its path is short enough for them."""
    tmp_path_factory.getbasetemp()  # not inside
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="t") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", folder)
        yield


@pytest.fixture
def client() -> Iterator[SyncMPClient]:
    """For tests that break it."""
    client = make_client()
    yield client
    client.shutdown()
    assert not is_alive(client.pid)
