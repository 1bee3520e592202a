"""Dense layers."""

import jax
import jax.numpy as jnp
from flax import nnx


class Linear(nnx.Module):
    """y = x @ kernel + bias, with kernel [in, out] and bias [out] or none.

    Products are accumulated in float32 by the backends that matter (cuBLAS, XLA:CPU); the result has the dtype of x.
    """

    def __init__(self, in_features: int, out_features: int, *, use_bias: bool, dtype: jnp.dtype) -> None:
        self.kernel = nnx.Param(jnp.zeros((in_features, out_features), dtype))
        self.bias = nnx.Param(jnp.zeros((out_features,), dtype)) if use_bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [..., in] -> [..., out]."""
        y = x @ self.kernel[...]
        return y if self.bias is None else y + self.bias[...]
