"""A decoder whose matrices are packed for the CPU's kernels."""

import jax.numpy as jnp
import numpy as np
import pytest
from model_helpers import Runner

from jaxllm.config import DecoderConfig
from jaxllm.models.decoder import Decoder
from jaxllm.models.graph import build_model_graph
from kernels_pallas.llvm.library import unavailable_reason
from kernels_pallas.llvm.matmul import pack

pytestmark = pytest.mark.skipif(unavailable_reason("float32") is not None, reason=str(unavailable_reason("float32")))

needs_bfloat16 = pytest.mark.skipif(unavailable_reason("bfloat16") is not None, reason=str(unavailable_reason("bfloat16")))
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 50,
    "hidden_size": 24,
    "intermediate_size": 42,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "attention_bias": True,
}
KV_GROUPS = [(0, layer) for layer in range(2)]


def config_of(tied):
    return DecoderConfig.from_hf({**TINY, "tie_word_embeddings": tied})


def random_tensors(config):
    rng = np.random.default_rng(0)
    parts = [part for spec in Decoder.param_specs(config, "float32") for part in spec.parts]
    return {part.name: (("norm" in part.name) + 0.2 * rng.standard_normal(part.shape)).astype(np.float32) for part in parts}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 5e-6), pytest.param("bfloat16", 3e-2, marks=needs_bfloat16)])
def test_logits_are_those_of_a_model_that_is_not_packed(dtype, tolerance, tied):
    """Of a prompt, then of a decode beside a chunk, then of decodes alone, with an id that is outside the vocabulary."""
    config = config_of(tied)
    tensors = random_tensors(config)
    ids = np.random.default_rng(1).integers(0, 50, 60).tolist()
    steps = [([ids[:20], ids[20:25]], False), ([ids[25:26], ids[26:46]], False), ([ids[46:47], [9999]], True)]
    found = []
    for packed in (True, False):
        runner = Runner(config, tensors, dtype=dtype, packed=packed, attention_backend="llvm")
        assert (runner.weights[0].shape == (50, 24)) is not packed
        hidden = [runner.run(chunks, decode_only=decode_only) for chunks, decode_only in steps]
        # After the two rows of the last step there is padding.
        logits = [runner.logits(part) for part in (*hidden[:2], hidden[2][:2])]
        found.append(np.concatenate(logits, dtype=np.float32))
    assert found[0].dtype == np.float32
    np.testing.assert_allclose(found[0], found[1], atol=tolerance * np.abs(found[1]).max(), rtol=0)


def test_what_is_packed_is_deleted():
    graph = build_model_graph(config_of(False), "float32", kv_groups=KV_GROUPS, packed=True)
    weights = [jnp.asarray(np.random.default_rng(0).standard_normal(spec.shape), jnp.float32) for spec in graph.specs]
    tables = {spec.path: np.asarray(weight) for spec, weight in zip(graph.specs, weights, strict=True)}
    arranged = graph.arrange(weights)
    for spec, shape, before, after in zip(graph.specs, graph.shapes, weights, arranged, strict=True):
        assert after.shape == shape
        assert before.is_deleted() is (len(spec.shape) == 2)
        assert (after is before) is (len(spec.shape) == 1)
        if len(spec.shape) == 2:
            table = tables[spec.path]
            np.testing.assert_array_equal(after, pack(jnp.asarray(table if spec.transpose else table.T)))
    graph.bind(arranged)


def test_a_wrong_shape_is_named():
    graph = build_model_graph(config_of(False), "float32", kv_groups=KV_GROUPS, packed=True)
    weights = [jnp.zeros(shape, jnp.float32) for shape in graph.shapes]
    index = next(i for i, spec in enumerate(graph.specs) if spec.path == "layers.1.mlp.down.kernel")
    weights[index] = jnp.zeros((42, 24), jnp.float32)
    with pytest.raises(ValueError, match=r"layers.1.mlp.down.kernel must be float32 \(1, 42, 32\), got float32 \(42, 24\)"):
        graph.bind(weights)


@pytest.mark.parametrize("tied", [False, True])
def test_the_last_stage_of_a_pipeline(tied):
    """Its head is packed, whether it is a copy of the embedding or not."""
    graph = build_model_graph(config_of(tied), "float32", kv_groups=KV_GROUPS[:1], layers=range(1, 2), packed=True)
    arranged = graph.arrange([jnp.zeros(spec.shape, jnp.float32) for spec in graph.specs])
    assert graph.bind(arranged).compute_logits(jnp.ones((3, 24))).shape == (3, 50)
    assert sum(shape == (2, 24, 32) for shape in graph.shapes) == 1


def test_a_model_that_is_not_packed_is_left_as_it_is():
    graph = build_model_graph(config_of(False), "float32", kv_groups=KV_GROUPS)
    weights = [jnp.zeros(spec.shape, jnp.float32) for spec in graph.specs]
    assert all(after is before for before, after in zip(weights, graph.arrange(weights), strict=True))
