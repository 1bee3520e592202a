"""What XLA calls: a function of its foreign function interface around a kernel, and work shared by XLA's threads.

Offsets are those of jaxlib/include/xla/ffi/api/c_api.h, version 0 of the interface; fields are only ever added at the ends of its
structures. `tests/kernels/test_llvm_foreign_call.py` reads them there.
"""

import ctypes
from collections.abc import Callable, Sequence

from kernels_pallas.llvm.code import Function, Module, Value

# XLA_FFI_CallFrame
FRAME_EXTENSION, FRAME_API, FRAME_CONTEXT, FRAME_ARGS, FRAME_RETS = 8, 16, 24, 72, 112
# XLA_FFI_Api
API_ERROR_DESTROY, API_SCHEDULE, API_NUM_THREADS = 64, 136, 144
# XLA_FFI_Buffer
BUFFER_DATA, BUFFER_DIMS = 24, 40
# XLA_FFI_Metadata_Extension and XLA_FFI_Metadata
EXTENSION_TYPE, EXTENSION_IS_METADATA, EXTENSION_METADATA = 8, 1, 24
METADATA_MAJOR, METADATA_MINOR, METADATA_TRAITS, METADATA_STATE = 24, 28, 32, 40
# The version of the interface whose fields are used here.
MAJOR, MINOR = 0, 4

# Of the state of a parallel loop. What threads write by turns is on cache lines of its own.
_NEXT, _DONE, _USERS, _COUNT, _BODY, _DATA, _STATE_BYTES = 0, 64, 128, 136, 144, 152, 192
# Looks at the others' progress before the thread lets others run.
_SPINS = 2000


class Buffer:
    """An operand or result."""

    def __init__(self, buffers: Value, index: int) -> None:
        pointer = buffers.function.load(buffers.at(index, "ptr"), "ptr")
        self.data = pointer.field(BUFFER_DATA, "ptr")
        self._dims = pointer.field(BUFFER_DIMS, "ptr")

    def dim(self, axis: int) -> Value:
        return self._dims.field(8 * axis, "i64")


def define_call(
    module: Module, name: str, num_args: int, write: Callable[[Function, Value, Sequence[Buffer], Buffer], None]
) -> Function:
    """A function that XLA can call, with one result.

    Args:
        write: writes what it does; gets the function, the call's frame (for `parallel_for`), the operands and the result.
    """
    function = Function(module, name, ["ptr"], returns="ptr", public=True)
    (frame,) = function.arguments
    extension = frame.field(FRAME_EXTENSION, "ptr")
    function.branch(function.emit(f"icmp ne {extension}, null", "i1"), "extended", "called")
    function.label("extended")
    is_question = extension.field(EXTENSION_TYPE, "i32").equals(EXTENSION_IS_METADATA)
    function.branch(is_question, "question", "called")
    function.label("question")
    metadata = extension.field(EXTENSION_METADATA, "ptr")
    for offset, answer in ((METADATA_MAJOR, MAJOR), (METADATA_MINOR, MINOR), (METADATA_TRAITS, 0)):
        function.store(function.constant(answer, "i32"), metadata.at(offset, "i8"))
    function.store(function.constant(0), metadata.at(METADATA_STATE, "i8"))
    function.give(function.null)
    function.label("called")
    operands, results = frame.field(FRAME_ARGS, "ptr"), frame.field(FRAME_RETS, "ptr")
    write(function, frame, [Buffer(operands, index) for index in range(num_args)], Buffer(results, 0))
    function.give(function.null)
    return function


def define_parallel_for(module: Module) -> Function:
    """parallel_for(frame, n, body, data): body(data, i) for each i below n, in this thread and in XLA's that have time.

    A thread takes the next i whenever it has done one. The calling thread works too and then waits for what others have begun,
    never for one that has not: where all of XLA's threads are busy, or wait themselves, it does everything alone. A thread that
    comes too late finds nothing to do; so the state lives until the last has looked at it.
    """
    work = _define_work(module)
    release = Function(module, "release", ["ptr"])
    (state,) = release.arguments
    users = release.emit(f"atomicrmw sub ptr {state.at(_USERS, 'i8').name}, i64 1 acq_rel", "i64")
    with release.when(users.equals(1)):
        release.call("free", [state])
    release.give()

    helper = Function(module, "helper", ["ptr"])
    helper.call(work, helper.arguments)
    helper.call(release, helper.arguments)
    helper.give()

    loop = Function(module, "parallel_for", ["ptr", "i64", "ptr", "ptr"])
    frame, count, body, data = loop.arguments
    api, context = frame.field(FRAME_API, "ptr"), frame.field(FRAME_CONTEXT, "ptr")
    arguments = loop.array("i64", 5)
    num_threads = loop.variable(1)
    _call_api(loop, api, API_NUM_THREADS, arguments, [loop.null, context, num_threads.pointer])
    helpers = loop.maximum(loop.minimum(num_threads.get() - 1, count - 1), 0)
    state = loop.call("malloc", [loop.constant(_STATE_BYTES)], "ptr")
    assert state is not None
    fields = ((_NEXT, 0), (_DONE, 0), (_USERS, helpers + 1), (_COUNT, count), (_BODY, body), (_DATA, data))
    for offset, value in fields:
        loop.store(loop.constant(value), state.at(offset, "i8"))
    with loop.loop(0, helpers):
        failed = _call_api(loop, api, API_SCHEDULE, arguments, [loop.null, context, loop.address_of(helper), state])
        with loop.when(failed):
            loop.call(helper, [state])
    loop.call(work, [state])

    spins = loop.variable(0)
    loop.jump("look")
    loop.label("look")
    done = loop.emit(f"load atomic i64, ptr {state.at(_DONE, 'i8').name} acquire, align 8", "i64")
    loop.branch(done < count, "wait", "finished")
    loop.label("wait")
    spins.set(spins.get() + 1)
    loop.call("llvm.x86.sse2.pause", [])
    loop.branch(spins.get() > _SPINS, "yield", "look")
    loop.label("yield")
    loop.call("sched_yield", [], "i32")
    loop.jump("look")
    loop.label("finished")
    loop.call(release, [state])
    loop.give()
    return loop


def _define_work(module: Module) -> Function:
    """work(state): do units of a parallel loop until none is left."""
    work = Function(module, "work", ["ptr"])
    (state,) = work.arguments
    count, body, data = state.field(_COUNT, "i64"), state.field(_BODY, "ptr"), state.field(_DATA, "ptr")
    work.jump("next")
    work.label("next")
    unit = work.emit(f"atomicrmw add ptr {state.at(_NEXT, 'i8').name}, i64 1 monotonic", "i64")
    work.branch(unit < count, "run", "finished")
    work.label("run")
    work.call(body, [data, unit])
    work.emit(f"atomicrmw add ptr {state.at(_DONE, 'i8').name}, i64 1 release", "i64")
    work.jump("next")
    work.label("finished")
    work.give()
    return work


def _call_api(function: Function, api: Value, offset: int, memory: Value, fields: Sequence[Value]) -> Value:
    """Call one of XLA's functions with a structure in `memory`: its size, then `fields`. Whether it failed."""
    function.store_fields(memory, [function.constant(8 * (len(fields) + 1)), *fields])
    error = function.call(api.field(offset, "ptr"), [memory], "ptr")
    assert error is not None
    failed = function.emit(f"icmp ne {error}, null", "i1")
    with function.when(failed):
        function.store_fields(memory, [function.constant(24), function.null, error])
        function.call(api.field(API_ERROR_DESTROY, "ptr"), [memory])
    return failed


def capsule(address: int) -> object:
    """A pointer to a C function, as jax wants it."""
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return new(address, None, None)
