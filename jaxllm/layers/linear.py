"""Dense layers."""

from collections.abc import Iterable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from kernels_pallas.dispatch import choose, log_choice, target_platform
from kernels_pallas.llvm.matmul import packed_matmul, packed_shape, packing_refusal, register_matmul


def matmul(x: jax.Array, weight: jax.Array, *, transposed: bool = False, out_dtype: jnp.dtype | None = None) -> jax.Array:
    """x [T, in] times weight [in, out], or [out, in] if `transposed` -> [T, out] in `out_dtype` (None: the dtype of x).

    Products are accumulated in float32 by the backends that matter.
    """
    dimensions = (((1,), (1 if transposed else 0,)), ((), ()))
    dot = partial(lax.dot_general, dimension_numbers=dimensions, preferred_element_type=out_dtype or x.dtype)
    if x.shape[0] != 1 or x.dtype != jnp.bfloat16:
        return dot(x, weight)

    # XLA:CPU converts the whole weight to float32 for a single row of bfloat16: ten times slower than two rows.
    def of_two_rows(x: jax.Array, weight: jax.Array) -> jax.Array:
        return dot(jnp.concatenate([x, x]), weight)[:1]

    return lax.platform_dependent(x, weight, cpu=of_two_rows, default=dot)


def choose_matmul(backend: str, in_features: Iterable[int], dtype: str, num_devices: int) -> str:
    """What multiplies activations and weights: "llvm", with packed weights, or "xla".

    Args:
        backend: one of them, or "auto".
        in_features: of the weights.
        num_devices: that share them.

    Raises:
        ValueError: if `backend` is unknown or cannot be used.
    """
    platform = target_platform()
    if platform != "cpu":
        refusal = f"it runs on CPUs, not on {platform}"
    elif num_devices > 1:
        refusal = f"it multiplies on one device, not on {num_devices}"
    else:
        refusal = next(filter(None, (packing_refusal(size, dtype) for size in in_features)), None)
    refusals = {"llvm": refusal, "xla": None}
    chosen = choose("matmul", backend, refusals)
    if chosen == "llvm":
        # Programs that come from disk call them too, and are not traced.
        for out_dtype in {dtype, "float32"}:
            register_matmul(dtype, out_dtype)
    log_choice("matmul", chosen, refusals)
    return chosen


class Linear(nnx.Module):
    """y = x @ kernel + bias, with kernel [in, out] and bias [out] or none; y has the dtype of x.

    Args:
        packed: the kernel lies as `kernels_pallas.llvm.matmul.pack` arranges it.
    """

    def __init__(self, in_features: int, out_features: int, *, use_bias: bool, dtype: jnp.dtype, packed: bool = False) -> None:
        shape = packed_shape(in_features, out_features, jnp.dtype(dtype).name) if packed else (in_features, out_features)
        self.kernel = nnx.Param(jnp.zeros(shape, dtype))
        self.bias = nnx.Param(jnp.zeros((out_features,), dtype)) if use_bias else None
        self.out_features = out_features
        self.packed = packed

    def __call__(self, x: jax.Array, num_rows: jax.Array | None = None) -> jax.Array:
        """x [T, in] -> [T, out].

        Args:
            num_rows: int32 []; rows of x from there on are padding, and what becomes of them is of no interest. None for none.
        """
        kernel = self.kernel[...]
        y = packed_matmul(x, kernel, self.out_features, num_rows=num_rows) if self.packed else matmul(x, kernel)
        return y if self.bias is None else y + self.bias[...]
