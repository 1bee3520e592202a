"""What XLA calls, and loops shared by its threads."""

import ctypes
import functools
import os
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from foreign_frame import Pool, header, structures

from kernels_pallas.llvm import foreign_call
from kernels_pallas.llvm.code import Function
from kernels_pallas.llvm.foreign_call import define_call, define_parallel_for
from kernels_pallas.llvm.library import register, unavailable_reason

pytestmark = pytest.mark.skipif(unavailable_reason("float32") is not None, reason=str(unavailable_reason("float32")))

ROOT = Path(__file__).parents[2]

OFFSETS = [
    ("FRAME_EXTENSION", "CallFrame", "extension_start"),
    ("FRAME_API", "CallFrame", "api"),
    ("FRAME_CONTEXT", "CallFrame", "ctx"),
    ("FRAME_ARGS", "CallFrame", "args.args"),
    ("FRAME_RETS", "CallFrame", "rets.rets"),
    ("API_ERROR_DESTROY", "Api", "XLA_FFI_Error_Destroy"),
    ("API_SCHEDULE", "Api", "XLA_FFI_ThreadPool_Schedule"),
    ("API_NUM_THREADS", "Api", "XLA_FFI_ThreadPool_NumThreads"),
    ("BUFFER_DATA", "Buffer", "data"),
    ("BUFFER_DIMS", "Buffer", "dims"),
    ("EXTENSION_TYPE", "Metadata_Extension", "extension_base.type"),
    ("EXTENSION_METADATA", "Metadata_Extension", "metadata"),
    ("METADATA_MAJOR", "Metadata", "api_version.major_version"),
    ("METADATA_MINOR", "Metadata", "api_version.minor_version"),
    ("METADATA_TRAITS", "Metadata", "traits"),
    ("METADATA_STATE", "Metadata", "state_type_id"),
]


def offset_of(types, name, path):
    type_, offset = types[f"XLA_FFI_{name}"], 0
    for field in path.split("."):
        offset += getattr(type_, field).offset
        type_ = dict(type_._fields_)[field]
    return offset


@pytest.mark.parametrize(("constant", "name", "path"), OFFSETS)
def test_offsets_are_those_of_the_header(constant, name, path):
    assert getattr(foreign_call, constant) == offset_of(structures(header()), name, path)


def test_a_field_that_is_moved_is_noticed():
    moved = header().replace("XLA_FFI_DataType dtype;\n  void* data;", "void* data;\n  XLA_FFI_DataType dtype;", 1)
    assert offset_of(structures(moved), "Buffer", "data") == foreign_call.BUFFER_DATA - 8


def test_every_offset_is_looked_up():
    names = {name for name in vars(foreign_call) if name.startswith(("FRAME_", "API_", "BUFFER_", "EXTENSION_", "METADATA_"))}
    assert names - {"EXTENSION_IS_METADATA"} == {constant for constant, _, _ in OFFSETS}
    assert re.search(r"XLA_FFI_Extension_Metadata = (\d+)", header())[1] == str(foreign_call.EXTENSION_IS_METADATA)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("ThreadPool_NumThreads_Args", ["ctx", "num_threads"]),
        ("ThreadPool_Schedule_Args", ["ctx", "task", "data"]),
        ("Error_Destroy_Args", ["error"]),
    ],
)
def test_arguments_of_calls_are_those_of_the_header(name, fields):
    type_ = structures(header())[f"XLA_FFI_{name}"]
    assert [field for field, _ in type_._fields_] == ["struct_size", "extension_start", *fields]
    assert ctypes.sizeof(type_) == 8 * (2 + len(fields))


def test_the_version_is_one_that_the_header_knows():
    major, minor = (int(re.search(rf"XLA_FFI_API_{part} (\d+)", header())[1]) for part in ("MAJOR", "MINOR"))
    assert major == foreign_call.MAJOR
    assert minor >= foreign_call.MINOR


def write_tally(module, name):
    """Operands [count], [turns]: result[i] is how often unit i was done. A unit takes up to 7 times that many turns."""
    parallel_for = define_parallel_for(module)
    unit = Function(module, "unit", ["ptr", "i64"])
    data, index = unit.arguments
    tally, turns = data.field(0, "ptr"), data.field(8, "i64")
    with unit.loop(0, turns * (index & 7)):
        unit.call("llvm.x86.sse2.pause", [])
    unit.emit(f"atomicrmw add ptr {tally.at(index, 'i32').name}, i32 1 monotonic", "i32")
    unit.give()

    def write(call, frame, operands, result):
        call.call("memset", [result.data, call.constant(0, "i32"), result.dim(0) * 4], "ptr")
        count, turns = (operand.data.field(0, "i32").widened() for operand in operands)
        data = call.array("i64", 2)
        call.store_fields(data, [result.data, turns])
        call.call(parallel_for, [frame, count, call.address_of(unit), data])

    define_call(module, name, 2, write)


@functools.cache
def tally_of(size):
    return jax.jit(jax.ffi.ffi_call(register("tally", write_tally), jax.ShapeDtypeStruct((size,), jnp.int32)))


def tally(count, size, turns=0):
    return np.asarray(tally_of(size)(np.full(1, count, np.int32), np.full(1, turns, np.int32)))


def expected(count, size):
    return (np.arange(size) < count).astype(np.int32)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 8, 9, 1000, 300_000])
def test_every_unit_is_done_once(count):
    np.testing.assert_array_equal(tally(count, count + 5), expected(count, count + 5))


def test_units_of_different_length():
    for turns in (1, 30, 1000):
        np.testing.assert_array_equal(tally(99, 100, turns), expected(99, 100))


def test_calls_from_many_threads_at_once():
    with ThreadPoolExecutor(12) as pool:
        for count, found in pool.map(lambda i: (i % 50, tally(i % 50, 64, i % 7)), range(3000)):
            np.testing.assert_array_equal(found, expected(count, 64))


def tally_in(pool, count, size=40):
    target, result = register("tally", write_tally), np.full(size, -1, np.int32)
    pool.call(target, [np.array([count], np.int32), np.zeros(1, np.int32)], result)
    return result


@pytest.mark.parametrize(
    ("num_threads", "count", "helpers"), [(1, 30, 0), (4, 30, 3), (4, 3, 2), (4, 1, 0), (4, 0, 0), (0, 9, 0)]
)
def test_threads_that_come_late_find_nothing_to_do(num_threads, count, helpers):
    pool = Pool(num_threads)
    found = tally_in(pool, count)
    assert len(pool.tasks) == helpers
    for task in pool.tasks:
        task()
    np.testing.assert_array_equal(found, expected(count, 40))


def test_threads_that_come_at_any_time():
    threads = []

    def start(pool, task):
        threads.append(threading.Thread(target=task))
        threads[-1].start()
        return True

    for _ in range(50):
        np.testing.assert_array_equal(tally_in(Pool(5, schedules=start), 40), expected(40, 40))
    for thread in threads:
        thread.join()
    assert len(threads) == 4 * 50


def test_a_pool_that_schedules_nothing():
    pool = Pool(4, schedules=lambda *_: False)
    np.testing.assert_array_equal(tally_in(pool, 30), expected(30, 40))
    assert pool.destroyed == [8, 8, 8]


def test_a_pool_that_runs_tasks_at_once():
    def run(pool, task):
        task()
        return True

    np.testing.assert_array_equal(tally_in(Pool(4, schedules=run), 30), expected(30, 40))


def test_no_pool():
    pool = Pool(None)
    np.testing.assert_array_equal(tally_in(pool, 30), expected(30, 40))
    assert (pool.tasks, pool.destroyed) == ([], [7])


ON_DEVICES = """
import functools, sys
from concurrent.futures import ThreadPoolExecutor
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import PartitionSpec as P
from kernels_pallas.llvm.matmul import pack, packed_matmul

mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
rng = np.random.default_rng(0)
weight = rng.integers(-3, 4, (48, 300)).astype(np.float32)

@jax.jit
@functools.partial(jax.shard_map, mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d"))
def on_all(x, weight):
    for _ in range(3):
        product = packed_matmul(x, weight, 300)
        x = x + jax.lax.pmax(product[:, :48], "d") % 5
    return product

def check(seed):
    x = np.random.default_rng(seed).integers(-3, 4, (8 * 19, 48)).astype(np.float32)
    found, packed = np.asarray(on_all(x, pack(weight))), weight
    for _ in range(3):
        product = x @ weight
        x = x + np.tile(product[:, :48].reshape(8, 19, 48).max(axis=0), (8, 1)) % 5
    np.testing.assert_array_equal(found, product)

for seed in range(10):
    check(seed)

@functools.partial(jax.jit, static_argnums=2)
def on_one(x, weight, extra):
    return packed_matmul(x, weight, 300) + extra

def alone(seed):
    x = np.random.default_rng(seed).integers(-3, 4, (1 + seed % 40, 48)).astype(np.float32)
    np.testing.assert_array_equal(on_one(x, pack(weight), seed % 8), x @ weight + seed % 8)

with ThreadPoolExecutor(8) as pool:
    list(pool.map(alone, range(60)))
print("done")
"""


@pytest.mark.parametrize("nproc", ["1", "3"])
def test_eight_devices_with_few_threads(nproc):
    flags = "--xla_force_host_platform_device_count=8"
    environment = {**os.environ, "NPROC": nproc, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", ON_DEVICES]
    run = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert run.stdout == "done\n", run.stderr


AT_ITS_END = """
import jax, numpy as np
from kernels_pallas.llvm.matmul import pack, packed_matmul
x, weight = np.ones((600, 512), np.float32), pack(np.ones((512, 2048), np.float32))
run = jax.jit(lambda x, weight: packed_matmul(x, weight, 2048))
results = [run(x, weight) for _ in range(20)]
"""


def test_a_process_can_end_while_kernels_run():
    subprocess.run([sys.executable, "-c", AT_ITS_END], cwd=ROOT, timeout=60, check=True)
