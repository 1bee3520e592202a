"""Random parameters without a checkpoint, for tests and for measuring speed."""

import functools
import zlib
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from jaxllm.layers.spec import ParamSpec
from jaxllm.weights.layout import Layout
from jaxllm.weights.load import complete_shardings
from jaxllm.weights.reader import dtype_of

# The spread that most models of the Llama family start their training from; with normalization it keeps activations sane.
_STANDARD_DEVIATION = 0.02


def dummy_params(
    specs: Sequence[ParamSpec], *, seed: int = 0, shardings: Mapping[str, Sharding] | None = None
) -> dict[str, jax.Array]:
    """Random parameters, made on the devices that hold them.

    Norm weights (vectors that are no bias) are ones; all else is normal with a standard deviation of 0.02. A parameter's values
    depend on the names and shapes of its checkpoint tensors, its dtype and `seed`: not on the other parameters, nor on the number
    of devices.

    Args:
        shardings: of each path; None puts everything on the first device.

    Returns:
        path → array, in the order of `specs`.

    Raises:
        ValueError: naming a path that is given twice or has no sharding.
    """
    shardings = complete_shardings(specs, shardings)

    @functools.cache
    def maker(layout: Layout, dtype: str, sharding: Sharding):
        deviation = jnp.asarray(_STANDARD_DEVIATION, dtype_of(dtype))

        def make(root: jax.Array, names: jax.Array) -> jax.Array:
            keys = jax.vmap(jax.random.fold_in, (None, 0))(root, names)
            return layout.assemble(
                tuple(jax.random.normal(keys[i], part.shape, dtype_of(dtype)) * deviation for i, part in enumerate(layout.parts))
            )

        return jax.jit(make, out_shardings=sharding)

    @functools.cache
    def ones(shape: tuple[int, ...], dtype: str, sharding: Sharding):
        return jax.jit(functools.partial(jnp.ones, shape, dtype_of(dtype)), out_shardings=sharding)

    params = {}
    root = jax.random.key(seed)
    for spec in specs:
        kind = (spec.dtype, shardings[spec.path])
        if _is_norm(spec):
            params[spec.path] = ones(spec.shape, *kind)()
        else:
            names = np.array([zlib.crc32(part.name.encode()) for part in spec.parts], np.uint32)
            params[spec.path] = maker(Layout.of(spec), *kind)(root, names)
    return params


def _is_norm(spec: ParamSpec) -> bool:
    return len(spec.shape) == 1 and not any(part.name.endswith("bias") for part in spec.parts)
