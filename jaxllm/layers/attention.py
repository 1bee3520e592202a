"""Self-attention over the paged KV cache."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from jaxllm.layers.linear import Linear
from jaxllm.layers.norm import RMSNorm
from jaxllm.layers.rotary import apply_rope
from kernels_pallas.kv_cache_write import write_kv
from kernels_pallas.paged_attention import AttentionPlan, Call, paged_attention, plan_attention
from sharding.rules import KV_CACHE_AXES, spec_of


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["positions", "slot_mapping", "block_tables", "seq_lens", "query_start_loc", "num_decodes", "plan"],
    meta_fields=["decode_only"],
)
@dataclass(frozen=True)
class AttentionMetadata:
    """Where the tokens of a step belong. G is the number of KV cache groups.

    Attributes:
        positions: int32 [T], position of each token in its request.
        slot_mapping: int32 [G, T], where its keys and values go; negative for padding.
        block_tables: int32 [G, R, P].
        seq_lens: int32 [R], tokens of each row after this step; 0 for a padding row.
        query_start_loc: int32 [R + 1], first token of each row; a padding row has none.
        num_decodes: int32 [], rows at the front with exactly one token.
        decode_only: T == R, and token r is row r's only one. Static: it selects the compiled form.
        plan: how the kernels share the work of a layer; see `plan_attention`. None where they need none.
    """

    positions: jax.Array
    slot_mapping: jax.Array
    block_tables: jax.Array
    seq_lens: jax.Array
    query_start_loc: jax.Array
    num_decodes: jax.Array
    decode_only: bool
    plan: AttentionPlan | None = None

    @property
    def num_tokens(self) -> jax.Array:
        """int32 [], of which the tokens from there on are padding."""
        return rows_in_use(self.seq_lens) if self.decode_only else self.query_start_loc[-1]


def rows_in_use(seq_lens: jax.Array) -> jax.Array:
    """int32 [], one more than the last row that is no padding. `seq_lens` int32 [R]."""
    return jnp.max(jnp.where(seq_lens > 0, jnp.arange(1, seq_lens.shape[0] + 1, dtype=jnp.int32), 0))


class Attention(nnx.Module):
    """q, k, v in one product; norms and rotation; keys and values into the cache; paged attention; output product.

    The columns of `qkv` are `num_stripes` stripes [q_s | k_s | v_s], so that each of that many devices finds the q, k and v of
    its own heads side by side.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        qkv_bias: bool,
        out_bias: bool,
        qk_norm_eps: float | None,
        sliding_window: int | None,
        kv_group: int,
        num_stripes: int,
        dtype: jnp.dtype,
        mesh: Mesh | None,
        backend: str,
        fp8_cache: bool = False,
        packed: bool = False,
    ) -> None:
        """`qk_norm_eps`: epsilon of the norms of q and k heads; None for no such norms. `num_kv_heads`: after any repetition.

        `fp8_cache`: the KV cache holds 8-bit numbers, with the scales `kv_scale`: `num_stripes` stripes [k_s | v_s] of them.
        """
        columns = (num_heads + 2 * num_kv_heads) * head_dim
        self.qkv = Linear(hidden_size, columns, use_bias=qkv_bias, dtype=dtype, packed=packed)
        self.out = Linear(num_heads * head_dim, hidden_size, use_bias=out_bias, dtype=dtype, packed=packed)
        self.q_norm = None if qk_norm_eps is None else RMSNorm(head_dim, eps=qk_norm_eps, dtype=dtype)
        self.k_norm = None if qk_norm_eps is None else RMSNorm(head_dim, eps=qk_norm_eps, dtype=dtype)
        self.kv_scale = nnx.Param(jnp.ones(2 * num_kv_heads, jnp.float32)) if fp8_cache else None
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.sliding_window = sliding_window
        self.kv_group = kv_group
        self.num_stripes = num_stripes
        self.mesh = mesh
        self.backend = backend

    def __call__(
        self, x: jax.Array, kv_cache: jax.Array, metadata: AttentionMetadata, cos: jax.Array, sin: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """x [T, M], kv_cache [N, 2, K, B, D], cos and sin [T, D/2] -> ([T, M], kv_cache)."""
        num_tokens = metadata.num_tokens
        q, k, v = self._split(self.qkv(x, num_tokens))
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        attend = partial(
            _write_and_attend,
            num_stripes=self.num_stripes if self.mesh is None else 1,
            sliding_window=self.sliding_window,
            decode_only=metadata.decode_only,
            backend=self.backend,
        )
        if self.mesh is not None:
            heads, cache, whole = spec_of((None, "heads", None)), spec_of(KV_CACHE_AXES), PartitionSpec()
            scales = spec_of(("heads",))
            attend = jax.shard_map(
                attend,
                mesh=self.mesh,
                in_specs=(heads, heads, heads, cache, scales, whole, whole, whole, whole, whole, whole),
                out_specs=(heads, cache),
                check_vma=False,
            )
        attended, kv_cache = attend(
            q,
            k,
            v,
            kv_cache,
            None if self.kv_scale is None else self.kv_scale[...],
            metadata.slot_mapping[self.kv_group],
            metadata.block_tables[self.kv_group],
            metadata.seq_lens,
            metadata.query_start_loc,
            metadata.num_decodes,
            metadata.plan,
        )
        return self.out(attended.reshape(x.shape[0], -1), num_tokens), kv_cache

    def plan(self, metadata: AttentionMetadata, kv_cache: jax.Array, dtype: jnp.dtype) -> AttentionPlan | None:
        """`metadata.plan` of the layers with this one's shapes and window.

        Args:
            kv_cache: of such a layer, [N, 2, K, B, D]; its shape and type.
            dtype: of the queries.
        """
        pages = metadata.block_tables.shape[2]
        stripes = 1 if self.mesh is None else self.num_stripes
        shape = (self.num_heads // stripes, self.num_kv_heads // stripes, self.head_dim)
        return plan_attention(
            metadata.seq_lens,
            metadata.query_start_loc,
            metadata.num_decodes,
            num_tokens=metadata.positions.shape[0],
            max_context=pages * kv_cache.shape[3],
            call=Call(*shape, kv_cache.shape[3], jnp.dtype(dtype).name, cache_dtype=kv_cache.dtype.name),
            sliding_window=self.sliding_window,
            decode_only=metadata.decode_only,
            implementation=self.backend,
        )

    def _split(self, qkv: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """[T, (H + 2 K) D] -> q [T, H, D], k [T, K, D], v [T, K, D]."""
        num_tokens, stripes = qkv.shape[0], self.num_stripes
        q_heads, kv_heads = self.num_heads // stripes, self.num_kv_heads // stripes
        heads = qkv.reshape(num_tokens, stripes, q_heads + 2 * kv_heads, self.head_dim)
        parts = jnp.split(heads, (q_heads, q_heads + kv_heads), axis=2)
        q, k, v = (part.reshape(num_tokens, -1, self.head_dim) for part in parts)
        return q, k, v


def _write_and_attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    kv_cache: jax.Array,
    kv_scale: jax.Array | None,
    slot_mapping: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_start_loc: jax.Array,
    num_decodes: jax.Array,
    plan: AttentionPlan | None,
    *,
    num_stripes: int,
    sliding_window: int | None,
    decode_only: bool,
    backend: str,
) -> tuple[jax.Array, jax.Array]:
    k_scale = v_scale = None
    if kv_scale is not None:
        k_scale, v_scale = kv_scale.reshape(num_stripes, 2, -1).swapaxes(0, 1).reshape(2, -1)
    kv_cache = write_kv(kv_cache, k, v, slot_mapping, k_scale=k_scale, v_scale=v_scale)
    attended = paged_attention(
        q,
        kv_cache,
        block_tables,
        seq_lens,
        query_start_loc,
        num_decodes,
        scale=q.shape[-1] ** -0.5,
        sliding_window=sliding_window,
        k_scale=k_scale,
        v_scale=v_scale,
        decode_only=decode_only,
        plan=plan,
        implementation=backend,
    )
    return attended, kv_cache
