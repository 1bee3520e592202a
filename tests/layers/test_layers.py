"""Linear, Embedding, RMSNorm, GatedMLP and the striped layout of Attention: small numbers by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxllm.layers.attention import Attention, AttentionMetadata
from jaxllm.layers.embedding import Embedding
from jaxllm.layers.linear import Linear
from jaxllm.layers.mlp import GatedMLP
from jaxllm.layers.norm import RMSNorm


def test_linear():
    linear = Linear(2, 3, use_bias=True, dtype=jnp.float32)
    linear.kernel[...] = jnp.array([[1.0, 2.0, 3.0], [10.0, 20.0, 30.0]])
    linear.bias[...] = jnp.array([0.5, 0.0, -0.5])
    np.testing.assert_array_equal(linear(jnp.array([[1.0, 2.0]])), [[21.5, 42.0, 62.5]])
    assert Linear(2, 3, use_bias=False, dtype=jnp.float32).bias is None


def test_embedding_clamps_and_gives_float32_logits():
    embedding = Embedding(3, 2, dtype=jnp.bfloat16)
    embedding.table[...] = jnp.array([[1.0, 0.0], [0.0, 1.0], [2.0, 256.0]], jnp.bfloat16)
    np.testing.assert_array_equal(embedding(jnp.array([2, 0, 7, -1])), jnp.array([[2, 256], [1, 0], [2, 256], [1, 0]]))
    logits = embedding.logits(jnp.array([[1.0, 1.0]], jnp.bfloat16))
    assert logits.dtype == jnp.float32
    # 258 has no bfloat16: the nearest are 256 and 260.
    np.testing.assert_array_equal(logits, [[1.0, 1.0, 258.0]])


def test_rms_norm():
    norm = RMSNorm(2, eps=0.0, dtype=jnp.float32)
    norm.scale[...] = jnp.array([1.0, 10.0])
    np.testing.assert_allclose(norm(jnp.array([[3.0, 4.0]])), [[3 / 12.5**0.5, 40 / 12.5**0.5]], rtol=1e-6)
    np.testing.assert_allclose(RMSNorm(2, eps=1.0, dtype=jnp.float32)(jnp.zeros((1, 2))), [[0.0, 0.0]])


def test_rms_norm_squares_in_float32():
    norm = RMSNorm(2, eps=1e-6, dtype=jnp.float16)
    np.testing.assert_allclose(norm(jnp.array([[1000.0, 1000.0]], jnp.float16)), [[1.0, 1.0]], rtol=1e-3)


@pytest.mark.parametrize(("activation", "of_one"), [("silu", 0.7310586), ("gelu", 0.8413447), ("gelu_pytorch_tanh", 0.8411920)])
def test_gated_mlp(activation, of_one):
    mlp = GatedMLP(1, 2, activation=activation, use_bias=True, num_stripes=1, dtype=jnp.float32)
    mlp.gate_up.kernel[...] = jnp.array([[1.0, 0.0, 3.0, 5.0]])
    mlp.gate_up.bias[...] = jnp.array([0.0, 1.0, 0.0, 0.0])
    mlp.down.kernel[...] = jnp.array([[1.0], [100.0]])
    mlp.down.bias[...] = jnp.array([0.5])
    np.testing.assert_allclose(mlp(jnp.array([[1.0]])), [[0.5 + of_one * 3 + of_one * 500]], rtol=1e-5)


def stripes(columns, shares, num_stripes):
    """Columns [part | part | …] with `shares` columns each, rearranged to stripes of one share of every part."""
    parts = np.split(columns, np.cumsum(shares)[:-1], axis=-1)
    cut = [np.split(part, num_stripes, axis=-1) for part in parts]
    return np.concatenate([part[stripe] for stripe in range(num_stripes) for part in cut], axis=-1)


def test_striped_gate_and_up_are_the_same_mlp():
    rng = np.random.default_rng(0)
    plain, striped = (GatedMLP(3, 8, activation="silu", use_bias=False, num_stripes=count, dtype=jnp.float32) for count in (1, 4))
    gate_up, down = rng.standard_normal((3, 16)), rng.standard_normal((8, 3))
    plain.gate_up.kernel[...], striped.gate_up.kernel[...] = jnp.asarray(gate_up), jnp.asarray(stripes(gate_up, (8, 8), 4))
    plain.down.kernel[...] = striped.down.kernel[...] = jnp.asarray(down)
    x = jnp.asarray(rng.standard_normal((5, 3)), jnp.float32)
    np.testing.assert_allclose(plain(x), striped(x), rtol=1e-5)


def attention(num_stripes, backend="auto"):
    return Attention(
        6,
        num_heads=4,
        num_kv_heads=2,
        head_dim=4,
        qkv_bias=True,
        out_bias=False,
        qk_norm_eps=None,
        sliding_window=None,
        kv_group=1,
        num_stripes=num_stripes,
        dtype=jnp.float32,
        mesh=None,
        backend=backend,
    )


def metadata_of_three_tokens():
    """One row of three tokens; KV cache group 1 keeps them in block 2, group 0 is never looked at."""
    return AttentionMetadata(
        positions=jnp.arange(3),
        slot_mapping=jnp.array([[-1, -1, -1], [8, 9, 10]]),
        block_tables=jnp.array([[[0]], [[2]]]),
        seq_lens=jnp.array([3]),
        query_start_loc=jnp.array([0, 3]),
        num_decodes=jnp.int32(0),
        decode_only=False,
    )


def test_striped_qkv_is_the_same_attention():
    rng = np.random.default_rng(0)
    plain, striped = attention(1), attention(2)
    qkv, bias, out = rng.standard_normal((6, 32)), rng.standard_normal((32,)), rng.standard_normal((16, 6))
    shares = (16, 8, 8)
    plain.qkv.kernel[...], striped.qkv.kernel[...] = jnp.asarray(qkv), jnp.asarray(stripes(qkv, shares, 2))
    plain.qkv.bias[...], striped.qkv.bias[...] = jnp.asarray(bias), jnp.asarray(stripes(bias, shares, 2))
    plain.out.kernel[...] = striped.out.kernel[...] = jnp.asarray(out)
    x, cache = jnp.asarray(rng.standard_normal((3, 6)), jnp.float32), jnp.zeros((3, 2, 2, 4, 4))
    turned = jnp.ones((3, 2)), jnp.zeros((3, 2))
    found, expected = (layer(x, cache, metadata_of_three_tokens(), *turned) for layer in (striped, plain))
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-5, atol=1e-5)
    v = x @ qkv[:, 24:] + bias[24:]
    np.testing.assert_allclose(expected[1][2, 1, :, :3].swapaxes(0, 1).reshape(3, 8), v, rtol=1e-4, atol=1e-4)
    assert not np.any(expected[1][:2])


def test_a_named_backend_reaches_the_kernel():
    layer = attention(1, backend="magic")
    with pytest.raises(ValueError, match="'magic'"):
        layer(jnp.zeros((3, 6)), jnp.zeros((3, 2, 2, 4, 4)), metadata_of_three_tokens(), jnp.ones((3, 2)), jnp.zeros((3, 2)))


def test_metadata_is_a_pytree_whose_form_is_static():
    metadata = metadata_of_three_tokens()
    leaves, treedef = jax.tree.flatten(metadata)
    assert len(leaves) == 6
    assert jax.tree.unflatten(treedef, leaves).decode_only is False
    other = jax.tree.structure(
        AttentionMetadata(**{name: getattr(metadata, name) for name in metadata.__dataclass_fields__} | {"decode_only": True})
    )
    assert treedef != other


def test_parameters_have_the_dtype_asked_for():
    state = nnx.state(nnx.eval_shape(lambda: GatedMLP(4, 8, activation="silu", use_bias=True, num_stripes=1, dtype=jnp.bfloat16)))
    assert {leaf.dtype for leaf in jax.tree.leaves(state)} == {jnp.dtype("bfloat16")}
