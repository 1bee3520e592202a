"""Names of Pallas Mosaic GPU that differ between versions of jax, and what its interpreter lacks.

The interpreter runs a kernel's threads, barriers and copies on the CPU. It has no tensor-core product of an operand in registers
and does not see what products read, so in it a product is a plain read of the operands: values come out right, and the race
detector sees the reads. It wants a fence between plain accesses and the next asynchronous copy to the same place.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

Interpret = plgpu.InterpretGPUParams | None


def interpreter(detect_races: bool = False) -> plgpu.InterpretGPUParams:
    """What to pass as `interpret` to run a kernel on the CPU."""
    return plgpu.InterpretGPUParams(detect_races=detect_races)


def races_found() -> bool:
    """Whether the interpreter saw a race in the last kernel that it ran with race detection."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    return bool(gpu_callbacks.get_races().races_found)


def reset_interpreter() -> None:
    """Make the interpreter usable again after a kernel failed in it."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    gpu_callbacks.reset_gpu_interpret_mode_state()


def product_with_transposed(a_ref: Any, b_ref: Any, interpret: Interpret) -> jax.Array:
    """float32 [M, N] of a [M, K] and b [N, K], both in shared memory."""
    if interpret is not None:
        a, b = a_ref[...], b_ref[...]
        plgpu.commit_smem()
        return jnp.dot(a.astype(jnp.float32), b.astype(jnp.float32).T)

    def product(acc_ref: Any) -> jax.Array:
        plgpu.wgmma(acc_ref, a_ref, b_ref.T)
        return acc_ref[...]

    return pl.run_scoped(product, plgpu.ACC((a_ref.shape[0], b_ref.shape[0]), jnp.float32))


def add_product(acc: jax.Array, a: jax.Array, b_ref: Any, interpret: Interpret) -> jax.Array:
    """acc [M, N] + a [M, K], both in registers, times b [K, N] in shared memory."""
    if interpret is not None:
        b = b_ref[...]
        plgpu.commit_smem()
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
