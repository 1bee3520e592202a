import jax
import numpy as np
import pytest
from weight_files import M, tiny_specs

from jaxllm.layers.spec import ParamSpec, Part
from jaxllm.weights.dummy import dummy_params


def some_specs(dtype: str = "float32") -> list[ParamSpec]:
    """A norm, a bias, a matrix: every shape costs a compilation."""
    return [spec for spec in tiny_specs(dtype) if spec.path in ("norm", "qkv.bias", "o.kernel")]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_values(dtype):
    specs = [*some_specs(dtype), ParamSpec("big", (500, 400), dtype, (None, None), (Part("big.weight", (500, 400)),))]
    params = dummy_params(specs, seed=3)
    assert list(params) == [spec.path for spec in specs]
    for spec in specs:
        values = params[spec.path]
        assert (values.shape, values.dtype.name) == (spec.shape, dtype)
        if "norm" in spec.path:
            assert (values == 1).all()
        else:
            assert np.unique(np.asarray(values).astype(np.float32)).size > 20
    big = np.asarray(params["big"]).astype(np.float64)
    assert abs(big.mean()) < 0.0005
    assert big.std() == pytest.approx(0.02, rel=0.02)


def test_seeds():
    specs = some_specs()
    first, again, other = (dummy_params(specs, seed=seed) for seed in (0, 0, 1))
    for path in first:
        np.testing.assert_array_equal(first[path], again[path])
        assert path.startswith("norm") or (first[path] != other[path]).any()
    # What else there is changes nothing; equal shapes at two paths differ.
    (matrix,) = (spec for spec in specs if spec.path == "o.kernel")
    np.testing.assert_array_equal(dummy_params([matrix])["o.kernel"], first["o.kernel"])
    two = [ParamSpec(path, (M, M), "float32", (None, None), (Part(path, (M, M)),)) for path in "ab"]
    params = dummy_params(two)
    assert (params["a"] != params["b"]).all()


def test_shardings_must_be_complete():
    with pytest.raises(ValueError, match=r"no sharding is given for parameters embed\.weight"):
        dummy_params(tiny_specs(), shardings={"norm": jax.sharding.SingleDeviceSharding(jax.devices()[0])})
