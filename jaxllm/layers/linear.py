"""Dense layers."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax


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


class Linear(nnx.Module):
    """y = x @ kernel + bias, with kernel [in, out] and bias [out] or none; y has the dtype of x."""

    def __init__(self, in_features: int, out_features: int, *, use_bias: bool, dtype: jnp.dtype) -> None:
        self.kernel = nnx.Param(jnp.zeros((in_features, out_features), dtype))
        self.bias = nnx.Param(jnp.zeros((out_features,), dtype)) if use_bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [T, in] -> [T, out]."""
        y = matmul(x, self.kernel[...])
        return y if self.bias is None else y + self.bias[...]
