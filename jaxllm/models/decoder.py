"""The Llama family: Llama 2 and 3, SmolLM2, Mistral, Qwen 2 and 3. What sets its members apart are fields of DecoderConfig."""

import dataclasses
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh

from jaxllm.config import DecoderConfig
from jaxllm.core.kv_cache_interface import KVCacheSpec
from jaxllm.layers.attention import Attention, AttentionMetadata
from jaxllm.layers.embedding import Embedding
from jaxllm.layers.mlp import GatedMLP
from jaxllm.layers.norm import RMSNorm
from jaxllm.layers.rotary import rope_cos_sin, rope_frequencies
from jaxllm.layers.spec import ParamSpec
from jaxllm.models import decoder_params


class DecoderLayer(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(
        self,
        config: DecoderConfig,
        dtype: jnp.dtype,
        *,
        shares: decoder_params.Shares,
        sliding_window: int | None,
        kv_group: int,
        num_stripes: int,
        mesh: Mesh | None,
        attention_backend: str,
        fp8_cache: bool,
        packed: bool,
    ) -> None:
        norm = partial(RMSNorm, config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)
        self.attention_norm = norm()
        self.attention = Attention(
            config.hidden_size,
            num_heads=shares.num_heads,
            num_kv_heads=shares.num_kv_heads,
            head_dim=config.head_dim,
            qkv_bias=config.qkv_bias,
            out_bias=config.attention_out_bias,
            qk_norm_eps=config.rms_norm_eps if config.qk_norm else None,
            sliding_window=sliding_window,
            kv_group=kv_group,
            num_stripes=num_stripes,
            dtype=dtype,
            mesh=mesh,
            backend=attention_backend,
            fp8_cache=fp8_cache,
            packed=packed,
        )
        self.mlp_norm = norm()
        self.mlp = GatedMLP(
            config.hidden_size,
            shares.intermediate_size,
            activation=config.hidden_act,
            use_bias=config.mlp_bias,
            num_stripes=num_stripes,
            dtype=dtype,
            packed=packed,
        )

    def __call__(
        self, x: jax.Array, kv_cache: jax.Array, metadata: AttentionMetadata, cos: jax.Array, sin: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """x [T, M], kv_cache [N, 2, K, B, D], cos and sin [T, D/2] -> ([T, M], kv_cache)."""
        attended, kv_cache = self.attention(self.attention_norm(x), kv_cache, metadata, cos, sin)
        x = x + attended
        return x + self.mlp(self.mlp_norm(x), metadata.num_tokens), kv_cache


@partial(jax.jit, static_argnums=0)
def _run_layer(
    graphdef: nnx.GraphDef,
    state: nnx.State,
    x: jax.Array,
    kv_cache: jax.Array,
    metadata: AttentionMetadata,
    cos: jax.Array,
    sin: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """One layer as a function of its own, so that layers of the same structure are traced and lowered once."""
    return nnx.merge(graphdef, state)(x, kv_cache, metadata, cos, sin)


class Decoder(nnx.Module):
    """Embedding, layers, final norm, output head; or one stage of a pipeline: some of the layers, and what comes before the first
    and after the last of them.

    Attributes:
        embed: of the first stage, and of a last one whose output head is tied to it.
        norm, lm_head: of the last stage.
    """

    def __init__(
        self,
        config: DecoderConfig,
        dtype: jnp.dtype,
        *,
        kv_groups: Sequence[tuple[int, int]],
        num_stripes: int = 1,
        mesh: Mesh | None = None,
        attention_backend: str = "auto",
        layers: range | None = None,
        fp8_cache: bool = False,
        packed: bool = False,
    ) -> None:
        """Parameters are zeros (scales ones): see `jaxllm.models.graph` for how weights get in.

        Args:
            kv_groups: of each layer, (KV cache group, array of the cache): `KVCacheConfig.array_of_layer()`.
            num_stripes: devices that share the heads; see `ParamSpec.num_stripes`.
            mesh: the devices, from `sharding.mesh.make_mesh(tensor=num_stripes)`; None for one device.
            attention_backend: `implementation` of `paged_attention`.
            layers: of this stage; None for all.
            fp8_cache: the KV cache holds 8-bit numbers, whose scales are parameters.
            packed: matrices lie as `kernels_pallas.llvm.matmul.pack` arranges them, for one CPU.

        Raises:
            ValueError: if `num_stripes` is below 1, or `kv_groups` does not fit.
        """
        layers = range(config.num_layers) if layers is None else layers
        if len(kv_groups) != len(layers):
            raise ValueError(f"kv_groups has {len(kv_groups)} entries for {len(layers)} layers")
        self.is_first, self.is_last = layers.start == 0, layers.stop == config.num_layers
        shares = decoder_params.Shares.of(config, num_stripes)

        def table() -> Embedding:
            return Embedding(shares.vocab_size, config.hidden_size, dtype=dtype, packed=packed)

        self.embed = table() if self.is_first or (self.is_last and config.tie_word_embeddings) else None
        self.layers = nnx.List(
            DecoderLayer(
                config,
                dtype,
                shares=shares,
                sliding_window=window,
                kv_group=group,
                num_stripes=num_stripes,
                mesh=mesh,
                attention_backend=attention_backend,
                fp8_cache=fp8_cache,
                packed=packed,
            )
            for window, (group, _) in zip(config.sliding_windows[layers.start : layers.stop], kv_groups, strict=True)
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype) if self.is_last else None
        self.lm_head = table() if self.is_last and not config.tie_word_embeddings else None
        self.config = config
        self.array_of_layer = tuple(array for _, array in kv_groups)

    def __call__(
        self, inputs: jax.Array, kv_caches: tuple[jax.Array, ...], metadata: AttentionMetadata
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """Token ids int32 [T], or what the stage before gave, and kv_caches of [N, 2, K, B, D] -> (hidden [T, M], kv_caches).

        What the last stage gives is after the final norm.
        """
        caches = list(kv_caches)
        inv_freq, factor = rope_frequencies(self.config.rope, self.config.head_dim, self.config.max_position_embeddings)
        # Behind a barrier: XLA:CPU would else fuse them into the rotation of each layer, and compute them there for every head.
        cos, sin = lax.optimization_barrier(rope_cos_sin(metadata.positions, inv_freq, factor))
        x = self.embed(inputs) if self.is_first else inputs
        plans = {}
        for layer, array in zip(self.layers, self.array_of_layer, strict=True):
            window = layer.attention.sliding_window
            if window not in plans:
                plans[window] = layer.attention.plan(metadata, caches[array], x.dtype)
            metadata = dataclasses.replace(metadata, plan=plans[window])
            graphdef, state = nnx.split(layer)
            x, caches[array] = _run_layer(graphdef, state, x, caches[array], metadata, cos, sin)
        return x if self.norm is None else self.norm(x), tuple(caches)

    def compute_logits(self, hidden: jax.Array, num_rows: jax.Array | None = None) -> jax.Array:
        """hidden [R, M] -> float32 [R, V]; V with the padding of `padded_vocab_size`, whose logits are -inf.

        Args:
            num_rows: int32 []; rows from there on are padding, whose logits may be anything. None for none.
        """
        logits = (self.lm_head or self.embed).logits(hidden, num_rows)
        if logits.shape[1] == self.config.vocab_size:
            return logits
        return jnp.where(jnp.arange(logits.shape[1]) < self.config.vocab_size, logits, -jnp.inf)

    @staticmethod
    def param_specs(
        config: DecoderConfig, dtype: str, num_stripes: int = 1, layers: range | None = None, *, fp8_cache: bool = False
    ) -> list[ParamSpec]:
        """Every parameter and the checkpoint tensors that it is made of.

        Args:
            layers: of a stage, whose parameters alone are given; their paths count the layers of the whole model.
            fp8_cache: as in the constructor.
        """
        return decoder_params.param_specs(config, dtype, num_stripes, layers, fp8_cache=fp8_cache)

    @staticmethod
    def padded_vocab_size(config: DecoderConfig, num_stripes: int = 1) -> int:
        """V as `compute_logits` gives it."""
        return decoder_params.Shares.of(config, num_stripes).vocab_size

    @staticmethod
    def padding(config: DecoderConfig, num_stripes: int) -> str:
        """What must be filled up with zero weights so that `num_stripes` devices share it evenly; "" for nothing."""
        return decoder_params.Shares.of(config, num_stripes).padding(config)

    @staticmethod
    def ignored_tensors(config: DecoderConfig) -> tuple[str, ...]:
        """Regular expressions for whole names of checkpoint tensors that the model does not need."""
        return decoder_params.ignored_tensors(config)

    @staticmethod
    def kv_cache_specs(config: DecoderConfig, block_size: int, dtype: str, num_stripes: int = 1) -> list[KVCacheSpec]:
        """What each layer keeps in the KV cache, whose numbers are of `dtype`."""
        return decoder_params.kv_cache_specs(config, block_size, dtype, num_stripes)
