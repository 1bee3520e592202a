"""Foreign calls as XLA makes them, by hand: with structures as jaxlib's header has them, and any thread pool."""

import ctypes
import re
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from kernels_pallas.llvm import library

Task = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_Api = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
_NUMBERS = {"size_t": ctypes.c_size_t, "int64_t": ctypes.c_int64, "int32_t": ctypes.c_int32, "int": ctypes.c_int}


def header():
    """Without its comments."""
    text = (Path(jax.ffi.include_dir()) / "xla/ffi/api/c_api.h").read_text()
    return re.sub(r"//.*", "", text)


def structures(text):
    """The structures of a header, by name."""
    numbers = dict(_NUMBERS)
    numbers |= dict.fromkeys(re.findall(r"typedef enum \{[^}]*\} (\w+);", text), ctypes.c_int)
    numbers |= dict.fromkeys(re.findall(r"typedef uint32_t (\w+);", text), ctypes.c_uint32)
    found = {}
    for name, body in re.findall(r"^(?:typedef )?struct (\w+) \{(.*?)^\}", text, re.DOTALL | re.MULTILINE):
        fields = []
        for line in filter(None, (line.strip() for line in body.split(";"))):
            function = re.fullmatch(r"_XLA_FFI_API_STRUCT_FIELD\((\w+)\)", line) or re.match(r"void \(\*(\w+)\)", line)
            type_, field = (None, function[1]) if function else re.fullmatch(r"(.*?)(\w+)", line, re.DOTALL).groups()
            if type_ is None or "*" in type_:
                fields.append((field, ctypes.c_void_p))
            else:
                fields.append((field, {**numbers, **found}[type_.strip()]))
        found[name] = type(name, (ctypes.Structure,), {"_fields_": fields})
    return found


class Pool:
    """XLA's thread pool, as a kernel sees it.

    Attributes:
        tasks: what was scheduled, not begun.
        destroyed: errors that were given back.
    """

    def __init__(self, num_threads: int, *, schedules: Callable[["Pool", Callable[[], None]], bool] | None = None) -> None:
        self.num_threads, self.tasks, self.destroyed = num_threads, [], []
        self._schedules = schedules
        self.types = structures(header())
        self._callbacks = [_Api(self._count), _Api(self._schedule), _Api(self._destroy)]
        self.api = self.types["XLA_FFI_Api"]()
        names = ("XLA_FFI_ThreadPool_NumThreads", "XLA_FFI_ThreadPool_Schedule", "XLA_FFI_Error_Destroy")
        for name, callback in zip(names, self._callbacks, strict=True):
            setattr(self.api, name, ctypes.cast(callback, ctypes.c_void_p).value)

    def _arguments(self, name, pointer):
        arguments = self.types[name].from_address(pointer)
        assert arguments.struct_size == ctypes.sizeof(arguments)
        assert arguments.extension_start is None
        return arguments

    def _count(self, pointer):
        arguments = self._arguments("XLA_FFI_ThreadPool_NumThreads_Args", pointer)
        if self.num_threads is None:
            return 7
        ctypes.c_int64.from_address(arguments.num_threads).value = self.num_threads
        return None

    def _schedule(self, pointer):
        arguments = self._arguments("XLA_FFI_ThreadPool_Schedule_Args", pointer)
        task, data = Task(arguments.task), arguments.data
        if self._schedules is None:
            self.tasks.append(lambda: task(data))
            return None
        return None if self._schedules(self, lambda: task(data)) else 8

    def _destroy(self, pointer):
        self.destroyed.append(self._arguments("XLA_FFI_Error_Destroy_Args", pointer).error)

    def call(self, target: str, operands: list[np.ndarray], result: np.ndarray) -> None:
        """Call a registered kernel, which writes `result`."""
        buffers = [self._buffer(array) for array in [*operands, result]]
        operand_pointers = (ctypes.c_void_p * len(operands))(*map(ctypes.addressof, buffers[:-1]))
        result_pointers = (ctypes.c_void_p * 1)(ctypes.addressof(buffers[-1]))
        frame = self.types["XLA_FFI_CallFrame"]()
        frame.api = ctypes.addressof(self.api)
        frame.args.size, frame.args.args = len(operands), ctypes.addressof(operand_pointers)
        frame.rets.size, frame.rets.rets = 1, ctypes.addressof(result_pointers)
        function = _Api(library._kernels[target][0].get_function_address("call"))
        assert function(ctypes.addressof(frame)) is None

    def _buffer(self, array):
        buffer = self.types["XLA_FFI_Buffer"]()
        dims = (ctypes.c_int64 * array.ndim)(*array.shape)
        buffer.data, buffer.rank, buffer.dims = array.ctypes.data, array.ndim, ctypes.addressof(dims)
        buffer.kept = dims, array
        return buffer
