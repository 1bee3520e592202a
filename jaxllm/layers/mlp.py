"""The feed-forward block."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from jaxllm.config import Activation
from jaxllm.layers.linear import Linear

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True),
}


class GatedMLP(nnx.Module):
    """down(act(gate(x)) * up(x)), gate and up fused into one product.

    The columns of `gate_up` are `num_stripes` stripes [gate_s | up_s], so that each of that many devices finds its own share of
    both side by side.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: Activation,
        use_bias: bool,
        num_stripes: int,
        dtype: jnp.dtype,
        packed: bool = False,
    ) -> None:
        self.gate_up = Linear(hidden_size, 2 * intermediate_size, use_bias=use_bias, dtype=dtype, packed=packed)
        self.down = Linear(intermediate_size, hidden_size, use_bias=use_bias, dtype=dtype, packed=packed)
        self.activation = activation
        self.num_stripes = num_stripes

    def __call__(self, x: jax.Array, num_rows: jax.Array | None = None) -> jax.Array:
        """x [T, M] -> [T, M]. `num_rows` as in `Linear`."""
        gate_up = self.gate_up(x, num_rows)
        stripes = gate_up.reshape(*gate_up.shape[:-1], self.num_stripes, 2, -1)
        gate, up = stripes[..., 0, :], stripes[..., 1, :]
        hidden = (ACTIVATIONS[self.activation](gate) * up).reshape(*gate_up.shape[:-1], -1)
        return self.down(hidden, num_rows)
