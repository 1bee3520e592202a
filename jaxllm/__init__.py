"""jaxllm: LLM inference and serving for NVIDIA GPUs, in JAX.

The names below are imported when they are first used, so that `import jaxllm` is quick and starts nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxllm.engine.async_llm import AsyncLLM
    from jaxllm.engine.engine_args import EngineArgs
    from jaxllm.llm import LLM
    from jaxllm.outputs import CompletionOutput, RequestOutput
    from jaxllm.sampling_params import RequestOutputKind, SamplingParams

__all__ = ["LLM", "AsyncLLM", "CompletionOutput", "EngineArgs", "RequestOutput", "RequestOutputKind", "SamplingParams"]

_HOMES = {
    "LLM": "jaxllm.llm",
    "AsyncLLM": "jaxllm.engine.async_llm",
    "CompletionOutput": "jaxllm.outputs",
    "EngineArgs": "jaxllm.engine.engine_args",
    "RequestOutput": "jaxllm.outputs",
    "RequestOutputKind": "jaxllm.sampling_params",
    "SamplingParams": "jaxllm.sampling_params",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'jaxllm' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
