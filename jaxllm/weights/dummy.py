"""Random parameters without a checkpoint, for tests and for measuring speed."""

import functools
import zlib
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from jaxllm.layers.spec import ParamSpec
from jaxllm.weights.load import complete_shardings
from jaxllm.weights.reader import dtype_of

# The spread that most models of the Llama family start their training from; with normalization it keeps activations sane.
_STANDARD_DEVIATION = 0.02


def dummy_params(
    specs: Sequence[ParamSpec], *, seed: int = 0, shardings: Mapping[str, Sharding] | None = None
) -> dict[str, jax.Array]:
    """Random parameters, made on the devices that hold them.

    Norm weights (vectors that are no bias) are ones; all else is normal with a standard deviation of 0.02. A parameter's values
    depend on its path, shape and dtype and on `seed`, not on the other parameters nor on how it is sharded.

    Args:
        shardings: of each path; None puts everything on the first device.

    Returns:
        path → array, in the order of `specs`.

    Raises:
        ValueError: naming a path that is given twice or has no sharding.
    """
    shardings = complete_shardings(specs, shardings)

    @functools.cache
    def maker(shape: tuple[int, ...], dtype: str, sharding: Sharding):
        def make(key: jax.Array) -> jax.Array:
            return jax.random.normal(key, shape, dtype_of(dtype)) * jnp.asarray(_STANDARD_DEVIATION, dtype_of(dtype))

        return jax.jit(make, out_shardings=sharding)

    @functools.cache
    def ones(shape: tuple[int, ...], dtype: str, sharding: Sharding):
        return jax.jit(functools.partial(jnp.ones, shape, dtype_of(dtype)), out_shardings=sharding)

    params = {}
    root = jax.random.key(seed)
    for spec in specs:
        kind = (spec.shape, spec.dtype, shardings[spec.path])
        if _is_norm(spec):
            params[spec.path] = ones(*kind)()
        else:
            params[spec.path] = maker(*kind)(jax.random.fold_in(root, zlib.crc32(spec.path.encode())))
    return params


def _is_norm(spec: ParamSpec) -> bool:
    return len(spec.shape) == 1 and not any(part.name.endswith("bias") for part in spec.parts)
