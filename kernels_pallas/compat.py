"""Names of Pallas Mosaic GPU that differ between versions of jax, and what its interpreter lacks.

The interpreter runs a kernel's threads, barriers and copies on the CPU. It has no tensor-core product of an operand in registers
and does not see what products read, so in it a product is a plain read of the operands. Values come out right, and the race
detector takes the read for one by the asynchronous proxy, which a tensor core's is: it wants a fence after plain writes.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

Interpret = plgpu.InterpretGPUParams | None


def interpreter(detect_races: bool = False) -> plgpu.InterpretGPUParams:
    """What to pass as `interpret` to run a kernel on the CPU."""
    if detect_races:
        _tell_products_from_plain_reads()
    return plgpu.InterpretGPUParams(detect_races=detect_races)


@functools.cache
def _tell_products_from_plain_reads() -> None:
    """Let the race detector order what the products of this module read by the asynchronous proxy's clock.

    Of that clock a warpgroup's own part counts fences. The reads count on the part of its first warp, which no kernel here uses.
    """
    from jax._src import source_info_util
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, race_detection_state

    products = {product_with_transposed.__name__, add_product.__name__}
    detector = race_detection_state.GPURaceDetectionState
    check_plain_read = detector.check_read

    def check_read(self: Any, thread: Any, clock: Any, buffer: Any, place: Any, source_info: Any = None) -> None:
        frame = None if source_info is None else source_info_util.user_frame(source_info.traceback)
        if frame is not None and frame.file_name == __file__ and frame.function_name.rpartition(".")[2] in products:
            memory = gpu_callbacks._get_shared_memory()
            with memory.lock:
                clocks = memory.clocks[thread]
                clocks.inc(memory.thread_to_vc_position(thread.warp(0)))
                clock = clocks.async_smem_clock.copy()
        check_plain_read(self, thread, clock, buffer, place, source_info)

    detector.check_read = check_read


def races_found() -> bool:
    """Whether the interpreter saw a race in the last kernel that it ran with race detection, or in the one that it runs."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    return bool(gpu_callbacks.get_races().races_found)


def interpreted_so_far() -> int | None:
    """A number that grows while the interpreter runs a kernel with race detection; None while it runs none."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    memory = gpu_callbacks._shared_memory
    return None if memory is None else sum(int(clock.generic_clock.clock.sum()) for clock in list(memory.clocks.values()))


def abort_interpreter(reason: str) -> None:
    """Make the kernel that the interpreter runs fail, also where its threads wait for one another."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    memory = gpu_callbacks._shared_memory
    if memory is not None:
        memory.set_failed(RuntimeError(reason), None, top_level=False)


def reset_interpreter() -> None:
    """Make the interpreter usable again after a kernel failed in it."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    gpu_callbacks.reset_gpu_interpret_mode_state()


def product_with_transposed(a_ref: Any, b_ref: Any, interpret: Interpret) -> jax.Array:
    """float32 [M, N] of a [M, K] and b [N, K], both in shared memory."""
    if interpret is not None:
        a, b = a_ref[...], b_ref[...]
        return jnp.dot(a.astype(jnp.float32), b.astype(jnp.float32).T)

    def product(acc_ref: Any) -> jax.Array:
        plgpu.wgmma(acc_ref, a_ref, b_ref.T)
        return acc_ref[...]

    return pl.run_scoped(product, plgpu.ACC((a_ref.shape[0], b_ref.shape[0]), jnp.float32))


def add_product(acc: jax.Array, a: jax.Array, b_ref: Any, interpret: Interpret) -> jax.Array:
    """acc [M, N] + a [M, K], both in registers, times b [K, N] in shared memory."""
    if interpret is not None:
        b = b_ref[...]
        return acc + jnp.dot(a.astype(jnp.float32), b.astype(jnp.float32))

    def product(acc_ref: Any) -> None:
        plgpu.wgmma(acc_ref, a, b_ref)

    return pl.run_state(product)(plgpu.ACC.init(acc))


def import_jax_triton() -> Any:
    """The module jax_triton, made to work with this version of jax."""
    import jax_triton

    if jax.__version_info__ >= (0, 12):
        # jax-triton 0.4 gives jax a rule for dropping unused calls that takes the arguments of older versions.
        from jax._src.interpreters import partial_eval
        from jax_triton.triton_lib import triton_kernel_call_p

        partial_eval.dce_rules[triton_kernel_call_p] = lambda _, *rest: ([True] * len(rest[-1].invars), rest[-1])
    return jax_triton
