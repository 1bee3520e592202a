"""What a Decoder's parameters and KV cache are made of, in names and shapes."""

from jaxllm.config import ITEMSIZE, DecoderConfig
from jaxllm.core.kv_cache_interface import KVCacheSpec
from jaxllm.layers.spec import ParamSpec, Part


def check_stripes(config: DecoderConfig, num_stripes: int) -> None:
    """Raise ValueError unless `num_stripes` devices can share the heads and the feed-forward columns."""
    if num_stripes < 1:
        raise ValueError(f"num_stripes must be at least 1, got {num_stripes!r}")
    for name in ("num_heads", "intermediate_size"):
        if getattr(config, name) % num_stripes:
            raise ValueError(f"{name} {getattr(config, name)} cannot be shared evenly by {num_stripes} devices")
    if config.num_kv_heads % num_stripes and num_stripes % config.num_kv_heads:
        raise ValueError(f"num_kv_heads {config.num_kv_heads} is neither a multiple nor a divisor of {num_stripes} devices")


def num_cache_heads(config: DecoderConfig, num_stripes: int) -> int:
    """KV heads over all devices: each is repeated if there are fewer than devices."""
    return max(config.num_kv_heads, num_stripes)


def kv_cache_specs(config: DecoderConfig, block_size: int, dtype: str, num_stripes: int) -> list[KVCacheSpec]:
    check_stripes(config, num_stripes)
    return [
        KVCacheSpec(block_size, num_cache_heads(config, num_stripes), config.head_dim, ITEMSIZE[dtype], window)
        for window in config.sliding_windows
    ]


def param_specs(config: DecoderConfig, dtype: str, num_stripes: int) -> list[ParamSpec]:
    check_stripes(config, num_stripes)
    hidden, vocab = config.hidden_size, config.vocab_size
    # A vocabulary that does not divide is kept whole on every device.
    vocab_axis = "vocab" if vocab % num_stripes == 0 else None

    def vector(path: str, size: int, name: str) -> ParamSpec:
        return ParamSpec(path, (size,), dtype, (None,), (Part(name, (size,)),))

    def table(path: str, name: str) -> ParamSpec:
        return ParamSpec(path, (vocab, hidden), dtype, (vocab_axis, None), (Part(name, (vocab, hidden)),))

    specs = [table("embed.table", "model.embed_tokens.weight")]
    for layer in range(config.num_layers):
        path, name = f"layers.{layer}", f"model.layers.{layer}"
        specs.append(vector(f"{path}.attention_norm.scale", hidden, f"{name}.input_layernorm.weight"))
        specs += _attention(config, dtype, num_stripes, f"{path}.attention", f"{name}.self_attn")
        if config.qk_norm:
            specs.append(vector(f"{path}.attention.q_norm.scale", config.head_dim, f"{name}.self_attn.q_norm.weight"))
            specs.append(vector(f"{path}.attention.k_norm.scale", config.head_dim, f"{name}.self_attn.k_norm.weight"))
        specs.append(vector(f"{path}.mlp_norm.scale", hidden, f"{name}.post_attention_layernorm.weight"))
        specs += _mlp(config, dtype, num_stripes, f"{path}.mlp", f"{name}.mlp")
    specs.append(vector("norm.scale", hidden, "model.norm.weight"))
    if not config.tie_word_embeddings:
        specs.append(table("lm_head.table", "lm_head.weight"))
    return specs


def ignored_tensors(config: DecoderConfig) -> tuple[str, ...]:
    # Old Llama checkpoints carry the rotary frequencies; tied ones may carry the output head a second time.
    patterns = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq", r"model\.rotary_emb\.inv_freq")
    return (*patterns, r"lm_head\.weight") if config.tie_word_embeddings else patterns


def _attention(config: DecoderConfig, dtype: str, num_stripes: int, path: str, name: str) -> list[ParamSpec]:
    hidden, head_dim = config.hidden_size, config.head_dim
    q_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
    repeat = num_cache_heads(config, num_stripes) // config.num_kv_heads
    columns = q_size + 2 * kv_size * repeat
    projections = (("q_proj", q_size, 1), ("k_proj", kv_size, repeat), ("v_proj", kv_size, repeat))

    def parts(kind: str, *tail: int) -> tuple[Part, ...]:
        return tuple(
            Part(f"{name}.{projection}.{kind}", (size, *tail), times, head_dim if times > 1 else 1)
            for projection, size, times in projections
        )

    specs = [
        ParamSpec(
            f"{path}.qkv.kernel",
            (hidden, columns),
            dtype,
            (None, "heads"),
            parts("weight", hidden),
            transpose=True,
            num_stripes=num_stripes,
        )
    ]
    if config.qkv_bias:
        specs.append(ParamSpec(f"{path}.qkv.bias", (columns,), dtype, ("heads",), parts("bias"), num_stripes=num_stripes))
    out = Part(f"{name}.o_proj.weight", (hidden, q_size))
    specs.append(ParamSpec(f"{path}.out.kernel", (q_size, hidden), dtype, ("heads", None), (out,), transpose=True))
    if config.attention_out_bias:
        specs.append(ParamSpec(f"{path}.out.bias", (hidden,), dtype, (None,), (Part(f"{name}.o_proj.bias", (hidden,)),)))
    return specs


def _mlp(config: DecoderConfig, dtype: str, num_stripes: int, path: str, name: str) -> list[ParamSpec]:
    hidden, inner = config.hidden_size, config.intermediate_size

    def parts(kind: str, *tail: int) -> tuple[Part, ...]:
        return tuple(Part(f"{name}.{projection}.{kind}", (inner, *tail)) for projection in ("gate_proj", "up_proj"))

    specs = [
        ParamSpec(
            f"{path}.gate_up.kernel",
            (hidden, 2 * inner),
            dtype,
            (None, "mlp"),
            parts("weight", hidden),
            transpose=True,
            num_stripes=num_stripes,
        )
    ]
    if config.mlp_bias:
        specs.append(ParamSpec(f"{path}.gate_up.bias", (2 * inner,), dtype, ("mlp",), parts("bias"), num_stripes=num_stripes))
    down = Part(f"{name}.down_proj.weight", (hidden, inner))
    specs.append(ParamSpec(f"{path}.down.kernel", (inner, hidden), dtype, ("mlp", None), (down,), transpose=True))
    if config.mlp_bias:
        specs.append(ParamSpec(f"{path}.down.bias", (hidden,), dtype, (None,), (Part(f"{name}.down_proj.bias", (hidden,)),)))
    return specs
