"""Calls of Triton kernels: on a GPU through jax-triton, on a CPU in Triton's own interpreter.

The interpreter runs a kernel's blocks one after another in NumPy, on the arrays' memory: values are those of the kernel, but
neither races nor speed show. It is meant for tests.
"""

import functools
import importlib.util
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def unavailable_reason() -> str | None:
    """Why no Triton kernel can be called here, None if it can; on a CPU Triton itself is enough."""
    for module, package in (("triton", "triton"), ("jax_triton", "jax-triton")):
        if importlib.util.find_spec(module) is None:
            return f"{package} is not installed"
    return None


@dataclass(frozen=True)
class Launch:
    """How a kernel is compiled and started.

    Attributes:
        grid: blocks in each of three dimensions.
        num_warps: groups of 32 threads of a block.
        num_stages: tiles that a loop's loads are ahead, plus one.
        compute_capability: 10 * major + minor; None on a CPU, where the kernel is interpreted.
    """

    grid: tuple[int, int, int]
    num_warps: int
    num_stages: int
    compute_capability: int | None


def call_triton(
    kernel: Any,
    launch: Launch,
    operands: Mapping[str, jax.Array | int | float | bool],
    *,
    out: Mapping[str, jax.ShapeDtypeStruct] | None = None,
    updated: Mapping[str, jax.Array] | None = None,
) -> tuple[jax.Array, ...]:
    """Run a kernel.

    Args:
        kernel: a function decorated with `triton.jit`.
        operands: its parameters by name, but for those below. Arrays are passed as pointers, the rest is static.
        out: parameters that point to new arrays, in which anything may be.
        updated: parameters that point to arrays with values of which the kernel changes some; copies of these arrays unless they
            are used nowhere else.

    Returns:
        The arrays of `out`, then those of `updated` as they are after the run.
    """
    out, updated = dict(out or {}), dict(updated or {})
    if launch.compute_capability is None:
        return _interpreted(kernel, launch.grid, operands, out, updated)
    from kernels_pallas.compat import import_jax_triton

    refs = {name: jax.new_ref(array) for name, array in updated.items()}
    results = import_jax_triton().triton_call(
        **operands,
        **refs,
        kernel=kernel,
        out_type=tuple(out.values()),
        grid=launch.grid,
        compute_capability=launch.compute_capability,
        backend_options=_backend_options(launch),
    )
    return (*results, *(jax.freeze(ref) for ref in refs.values()))


def _backend_options(launch: Launch) -> dict[str, Any]:
    """Of Triton's compiler."""
    assert launch.compute_capability is not None
    # Triton's own assembler is newer than the one that XLA uses. jax asks for CUDA 12.6, which knows version 8.5 of the language;
    # GPUs newer than Hopper need CUDA 12.9.
    ptx_version = 85 if launch.compute_capability <= 90 else 88
    return {
        "num_warps": launch.num_warps,
        "num_stages": launch.num_stages,
        "ptx_version": ptx_version,
        "enable_fp_fusion": True,
    }


def _interpreted(
    kernel: Any,
    grid: tuple[int, int, int],
    operands: Mapping[str, jax.Array | int | float | bool],
    out: dict[str, jax.ShapeDtypeStruct],
    updated: dict[str, jax.Array],
) -> tuple[jax.Array, ...]:
    arrays = {name: value for name, value in operands.items() if isinstance(value, jax.Array)}
    static = {name: value for name, value in operands.items() if name not in arrays}

    def run(arrays: dict[str, Any], updated: dict[str, Any]) -> tuple[np.ndarray, ...]:
        results = {name: _filled(shape) for name, shape in out.items()}
        results |= {name: np.array(value) for name, value in updated.items()}
        pointers = {name: _Array(np.asarray(value)) for name, value in arrays.items()}
        pointers |= {name: _Array(value) for name, value in results.items()}
        with _interpreter():
            interpreted(kernel).run(**pointers, **static, grid=grid, warmup=False)
        return tuple(results.values())

    shapes = (*out.values(), *(jax.ShapeDtypeStruct(value.shape, value.dtype) for value in updated.values()))
    return jax.pure_callback(run, shapes, arrays, updated)


# The interpreter replaces functions of triton.language while it runs.
_interpreter_lock = threading.Lock()


def _filled(shape: jax.ShapeDtypeStruct) -> np.ndarray:
    """An array with what new memory may hold at worst."""
    return np.full(shape.shape, np.nan if jnp.issubdtype(shape.dtype, jnp.floating) else -1, shape.dtype)


@functools.cache
def interpreted(kernel: Any) -> Any:
    """`kernel` for Triton's interpreter, with the `triton.jit` functions of ours that it calls."""
    from triton import language
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    function: Callable[..., Any] = kernel.fn
    # A copy of the globals, since the interpreter writes into them. It replaces functions of those modules that it finds there,
    # and puts back what it replaced for the outermost kernel alone: so that one has all that the functions in it have.
    scope = {**function.__globals__, "core": language.core}
    for name in function.__code__.co_names:
        value = scope.get(name)
        # Triton's own are handed to reductions, where the interpreter knows them by identity.
        if isinstance(value, JITFunction) and not value.__module__.startswith("triton."):
            scope[name] = interpreted(value)
    copy = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__)
    copy.__annotations__ = function.__annotations__
    return InterpretedFunction(copy)


@contextmanager
def _interpreter() -> Iterator[None]:
    """While it lasts, the functions of triton.language that are kernels themselves (`max`, `sum`, …) are interpreted too.

    And bfloat16, of which the interpreter knows little: products are those of the values, not of the bits, and rounding is to the
    nearest, as on a GPU.
    """
    from triton import language
    from triton.runtime.interpreter import TensorHandle, interpreter_builder
    from triton.runtime.jit import JITFunction

    plain_product, plain_cast = interpreter_builder.create_dot, interpreter_builder.cast_impl

    def values(operand: TensorHandle) -> TensorHandle:
        if operand.dtype.scalar != language.bfloat16:
            return operand
        return TensorHandle(operand.data.view(jnp.bfloat16).astype(np.float32), language.float32)

    def cast(source: TensorHandle, target: Any) -> TensorHandle:
        if source.dtype.scalar != language.float32 or target.scalar != language.bfloat16:
            return plain_cast(source, target)
        return TensorHandle(source.data.astype(jnp.bfloat16).view(np.uint16), language.bfloat16)

    with _interpreter_lock:
        compiled = {name: value for name, value in vars(language).items() if isinstance(value, JITFunction)}
        try:
            interpreter_builder.create_dot = lambda a, b, *rest: plain_product(values(a), values(b), *rest)
            interpreter_builder.cast_impl = cast
            for name, value in compiled.items():
                setattr(language, name, interpreted(value))
            yield
        finally:
            del interpreter_builder.create_dot, interpreter_builder.cast_impl
            for name, value in compiled.items():
                setattr(language, name, value)


class _Array:
    """A NumPy array with those methods of a tensor that Triton's interpreter asks for."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.dtype = _TRITON_TYPES[array.dtype.name]

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    # The rest is for tensors on a device, which the interpreter copies from there and back: here to itself.
    def untyped_storage(self) -> "_Array":
        return self

    def cpu(self) -> "_Array":
        return self

    def new_empty(self, *_: Any, **__: Any) -> "_Array":
        return _Array(self.array)

    def set_(self, *_: Any) -> None:
        pass

    def copy_(self, _: Any) -> None:
        pass

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return self.array.shape

    def stride(self) -> tuple[int, ...]:
        return self.array.strides


_TRITON_TYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "int32": "i32", "uint8": "u8"}
