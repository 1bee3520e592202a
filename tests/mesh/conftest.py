"""Engines on several devices.

These tests run on real GPUs with `pytest -m multi_gpu`, and on eight simulated CPU devices in tests/sharding: how many devices
there are is fixed when jax starts, so that takes a process of its own.
"""

import json
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tiny import TINY

from jaxllm import LLM

MakeLLM = Callable[..., LLM]

# Before a GPU is touched: engines in processes of their own need some of its memory too.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


@pytest.fixture(scope="session")
def compiled(pytestconfig: pytest.Config) -> str:
    """Compiled programs are kept from run to run beside pytest's own cache."""
    cache = pytestconfig.cache
    assert cache is not None
    return str(cache.mkdir("compiled"))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(TINY))
    return str(folder)


@pytest.fixture
def tiny_args(tiny_model: str, compiled: str) -> dict[str, Any]:
    """Of engines with the same random weights. So few blocks that requests are preempted, and prompts in several chunks."""
    return {
        "model": tiny_model,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "compilation_cache_dir": compiled,
        "use_tqdm_on_load": False,
        "dtype": "float32",
        "cudagraph_capture_sizes": [],
        "compile_sizes": [],
        "block_size": 4,
        "max_model_len": 128,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 16,
        "num_gpu_blocks_override": 36,
    }


@pytest.fixture
def make_tiny(tiny_args: dict[str, Any]) -> Iterator[MakeLLM]:
    """Make such engines."""
    made: list[LLM] = []

    def make(**kwargs: Any) -> LLM:
        made.append(LLM(**{**tiny_args, **kwargs}))
        return made[-1]

    yield make
    for llm in made:
        llm.shutdown()
