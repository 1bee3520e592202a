"""Kernels on arrays with memory around them that nobody may touch. A process that does is killed."""

import ctypes
import itertools
import mmap

import jax.numpy as jnp
import numpy as np
from attention_spec import attention_spec, case_of
from foreign_frame import Pool

from kernels_pallas.llvm.library import unavailable_reason
from kernels_pallas.llvm.matmul import pack, register_matmul
from kernels_pallas.llvm.paged_attention import register_paged_attention

_kept = []


def guarded(array, *, at_end):
    """A copy that begins or ends where memory does."""
    pages = -(-max(array.nbytes, 1) // mmap.PAGESIZE)
    memory = mmap.mmap(-1, (pages + 2) * mmap.PAGESIZE)
    _kept.append(memory)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for page in (start, start + (pages + 1) * mmap.PAGESIZE):
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(page), mmap.PAGESIZE, 0) == 0
    offset = (pages + 1) * mmap.PAGESIZE - array.nbytes if at_end else mmap.PAGESIZE
    copy = np.frombuffer(memory, array.dtype, array.size, offset).reshape(array.shape)
    copy[...] = array
    return copy


def run(target, operands, shape, dtype, at_end):
    result = guarded(np.zeros(shape, dtype), at_end=at_end)
    Pool(1).call(target, [guarded(operand, at_end=at_end) for operand in operands], result)
    return result.astype(np.float64)


def products(dtype):
    for rows, columns, at_end in itertools.product((1, 13, 14, 15, 29), (1, 16, 31, 33, 64), (False, True)):
        x, weight = np.ones((rows, 6), dtype), np.ones((6, columns), dtype)
        target = register_matmul(np.dtype(dtype).name, np.dtype(dtype).name)
        for num_rows in (rows, rows - 1, 0):
            found = run(
                target, [x, np.asarray(pack(jnp.asarray(weight))), np.array(num_rows, np.int32)], (rows, columns), dtype, at_end
            )
            np.testing.assert_array_equal(found, np.where(np.arange(rows) < num_rows, 6, 0)[:, None].repeat(columns, axis=1))


def attentions(dtype):
    decodes, chunks = [(n, 1) for n in (1, 16, 17, 33)], [(50, 20), (7, 7), (96, 96)]
    shapes = [(16, 4, 2, 32), (48, 3, 1, 80), (32, 48, 1, 32), (16, 4, 4, 256)]
    for shape, rows, window, at_end in itertools.product(shapes, (decodes, chunks), (None, 9), (False, True)):
        case = case_of(rows, shape, dtype)
        pages = max(-(-length // shape[0]) for length, _ in rows)
        case.block_tables = np.ascontiguousarray(case.block_tables[:, :pages])
        sinks = np.full(shape[1], -np.inf, np.float32)
        switches = [np.array([shape[3] ** -0.5, 0], np.float32), np.array([window or 0, rows is decodes], np.int32)]
        operands = [case.q, case.kv_cache, case.block_tables, case.seq_lens, case.query_start_loc, sinks, *switches]
        target = register_paged_attention(np.dtype(dtype).name, shape[3])
        found = run(target, operands, case.q.shape, dtype, at_end)
        expected = attention_spec(case, scale=shape[3] ** -0.5, sliding_window=window)
        np.testing.assert_allclose(found, expected, atol=5e-6 if dtype is np.float32 else 2e-2)


for dtype in (np.float32, jnp.bfloat16):
    if unavailable_reason(np.dtype(dtype).name) is None:
        products(dtype)
        attentions(dtype)
print("done")
