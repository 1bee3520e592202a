"""What a Decoder's parameters and KV cache are made of, in names and shapes, and how devices share them."""

from dataclasses import dataclass

from jaxllm.config import ITEMSIZE, DecoderConfig
from jaxllm.core.kv_cache_interface import KVCacheSpec
from jaxllm.layers.spec import ParamSpec, Part, ScalePart

# The sampler looks at blocks of so many neighbouring tokens; no block may lie on two devices.
VOCAB_BLOCK = 128


@dataclass(frozen=True)
class Shares:
    """The sizes of a model that `num_stripes` devices share evenly. What does not divide is filled up with zero weights.

    Every KV head becomes `repeat` copies, each for `heads_per_copy` of its query heads; so KV heads that are fewer than devices
    are there more than once. Zero query heads fill up copies that have too few, and zero copies, with their zero query heads,
    make the number of copies a multiple of that of devices. The output product multiplies a zero head's result by zero weights.

    Attributes:
        num_heads, num_kv_heads, intermediate_size, vocab_size: over all devices.
        repeat: copies of a KV head.
        heads_per_copy: query heads of one.
    """

    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    vocab_size: int
    repeat: int
    heads_per_copy: int

    @classmethod
    def of(cls, config: DecoderConfig, num_stripes: int) -> "Shares":
        """
        Raises:
            ValueError: if `num_stripes` is below 1.
        """
        if num_stripes < 1:
            raise ValueError(f"num_stripes must be at least 1, got {num_stripes!r}")
        group = config.num_heads // config.num_kv_heads
        repeat = min(max(num_stripes // config.num_kv_heads, 1), group)
        heads_per_copy = -(-group // repeat)
        num_copies = _round_up(config.num_kv_heads * repeat, num_stripes)
        return cls(
            num_heads=num_copies * heads_per_copy,
            num_kv_heads=num_copies,
            intermediate_size=_round_up(config.intermediate_size, num_stripes),
            vocab_size=_round_up(config.vocab_size, num_stripes * VOCAB_BLOCK) if num_stripes > 1 else config.vocab_size,
            repeat=repeat,
            heads_per_copy=heads_per_copy,
        )

    def padding(self, config: DecoderConfig) -> str:
        """What is filled up and how far, for people; "" if nothing is."""
        sizes = {
            "query heads": "num_heads",
            "feed-forward columns": "intermediate_size",
            "tokens of the vocabulary": "vocab_size",
        }
        found = {name: (getattr(config, field), getattr(self, field)) for name, field in sizes.items()}
        kv_heads = config.num_kv_heads * self.repeat
        found["KV heads" if self.repeat == 1 else f"KV heads, {self.repeat} copies of each,"] = (kv_heads, self.num_kv_heads)
        return ", ".join(f"{real} {name} to {padded}" for name, (real, padded) in found.items() if real != padded)


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def kv_cache_specs(config: DecoderConfig, block_size: int, dtype: str, num_stripes: int) -> list[KVCacheSpec]:
    num_kv_heads = Shares.of(config, num_stripes).num_kv_heads
    return [KVCacheSpec(block_size, num_kv_heads, config.head_dim, ITEMSIZE[dtype], window) for window in config.sliding_windows]


# The table of a last stage whose output head is tied to the first stage's embedding: there are two, and a path is of one.
TIED_TABLE = "tied_embed.table"


def param_specs(
    config: DecoderConfig, dtype: str, num_stripes: int, layers: range | None = None, *, fp8_cache: bool = False
) -> list[ParamSpec]:
    shares = Shares.of(config, num_stripes)
    hidden, vocab = config.hidden_size, config.vocab_size

    def vector(path: str, size: int, name: str) -> ParamSpec:
        return ParamSpec(path, (size,), dtype, (None,), (Part(name, (size,)),))

    def table(path: str, name: str) -> ParamSpec:
        part = Part(name, (vocab, hidden), padding=shares.vocab_size - vocab)
        return ParamSpec(path, (shares.vocab_size, hidden), dtype, ("vocab", None), (part,))

    layers = range(config.num_layers) if layers is None else layers
    is_first, is_last = layers.start == 0, layers.stop == config.num_layers
    specs = [table("embed.table", "model.embed_tokens.weight")] if is_first else []
    for layer in layers:
        path, name = f"layers.{layer}", f"model.layers.{layer}"
        specs.append(vector(f"{path}.attention_norm.scale", hidden, f"{name}.input_layernorm.weight"))
        specs += _attention(config, shares, dtype, num_stripes, f"{path}.attention", f"{name}.self_attn")
        if config.qk_norm:
            specs.append(vector(f"{path}.attention.q_norm.scale", config.head_dim, f"{name}.self_attn.q_norm.weight"))
            specs.append(vector(f"{path}.attention.k_norm.scale", config.head_dim, f"{name}.self_attn.k_norm.weight"))
        if fp8_cache:
            specs.append(_kv_scales(config, shares, num_stripes, f"{path}.attention", f"{name}.self_attn"))
        specs.append(vector(f"{path}.mlp_norm.scale", hidden, f"{name}.post_attention_layernorm.weight"))
        specs += _mlp(config, shares, dtype, num_stripes, f"{path}.mlp", f"{name}.mlp")
    if is_last:
        specs.append(vector("norm.scale", hidden, "model.norm.weight"))
        if not config.tie_word_embeddings:
            specs.append(table("lm_head.table", "lm_head.weight"))
        elif not is_first:
            specs.append(table(TIED_TABLE, "model.embed_tokens.weight"))
    return specs


def ignored_tensors(config: DecoderConfig) -> tuple[str, ...]:
    # Old Llama checkpoints carry the rotary frequencies; tied ones may carry the output head a second time.
    # Scales of quantized keys and values are of use to an 8-bit KV cache only, those of queries and weights of attention never.
    patterns = (
        r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
        r"model\.rotary_emb\.inv_freq",
        r"model\.layers\.\d+\.self_attn\.(attn\.)?(q|k|v|prob)_scale",
        r"model\.layers\.\d+\.self_attn\.(q_proj\.q|k_proj\.k|v_proj\.v|k_proj\.output|v_proj\.output)_scale",
    )
    return (*patterns, r"lm_head\.weight") if config.tie_word_embeddings else patterns


def _attention(config: DecoderConfig, shares: Shares, dtype: str, num_stripes: int, path: str, name: str) -> list[ParamSpec]:
    hidden, head_dim = config.hidden_size, config.head_dim
    q_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
    group = config.num_heads // config.num_kv_heads
    copies_missing = shares.num_kv_heads - config.num_kv_heads * shares.repeat
    q_padding = {"padding": copies_missing * shares.heads_per_copy * head_dim}
    if heads_missing := shares.repeat * shares.heads_per_copy - group:
        q_padding |= {"repeat_size": group * head_dim, "group_padding": heads_missing * head_dim}
    kv_padding = {"padding": copies_missing * head_dim}
    if shares.repeat > 1:
        kv_padding |= {"repeat": shares.repeat, "repeat_size": head_dim}
    columns = (shares.num_heads + 2 * shares.num_kv_heads) * head_dim
    projections = (("q_proj", q_size, q_padding), ("k_proj", kv_size, kv_padding), ("v_proj", kv_size, kv_padding))

    def parts(kind: str, *tail: int) -> tuple[Part, ...]:
        return tuple(Part(f"{name}.{projection}.{kind}", (size, *tail), **padding) for projection, size, padding in projections)

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
    out = Part(f"{name}.o_proj.weight", (hidden, q_size), **q_padding, axis=1)
    rows = shares.num_heads * head_dim
    specs.append(ParamSpec(f"{path}.out.kernel", (rows, hidden), dtype, ("heads", None), (out,), transpose=True))
    if config.attention_out_bias:
        specs.append(ParamSpec(f"{path}.out.bias", (hidden,), dtype, (None,), (Part(f"{name}.o_proj.bias", (hidden,)),)))
    return specs


def _kv_scales(config: DecoderConfig, shares: Shares, num_stripes: int, path: str, name: str) -> ParamSpec:
    """Of what an 8-bit KV cache holds, k's and v's, a number a KV head; float32 whatever the model is in."""
    padding = shares.num_kv_heads - config.num_kv_heads * shares.repeat

    def part(kind: str) -> ScalePart:
        # As llm-compressor, vLLM itself, ModelOpt and AutoFP8 call them.
        others = (f"attn.{kind}_scale", f"{kind}_proj.{kind}_scale", f"{kind}_proj.output_scale")
        names = tuple(f"{name}.{other}" for other in others)
        size = (config.num_kv_heads,)
        return ScalePart(f"{name}.{kind}_scale", size, repeat=shares.repeat, padding=padding, other_names=names)

    count = 2 * shares.num_kv_heads
    return ParamSpec(f"{path}.kv_scale", (count,), "float32", ("heads",), (part("k"), part("v")), num_stripes=num_stripes)


def _mlp(config: DecoderConfig, shares: Shares, dtype: str, num_stripes: int, path: str, name: str) -> list[ParamSpec]:
    hidden, inner = config.hidden_size, shares.intermediate_size
    size, padding = config.intermediate_size, shares.intermediate_size - config.intermediate_size

    def parts(kind: str, *tail: int) -> tuple[Part, ...]:
        projections = ("gate_proj", "up_proj")
        return tuple(Part(f"{name}.{projection}.{kind}", (size, *tail), padding=padding) for projection in projections)

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
    down = Part(f"{name}.down_proj.weight", (hidden, size), padding=padding, axis=1)
    specs.append(ParamSpec(f"{path}.down.kernel", (inner, hidden), dtype, ("mlp", None), (down,), transpose=True))
    if config.mlp_bias:
        specs.append(ParamSpec(f"{path}.down.bias", (hidden,), dtype, (None,), (Part(f"{name}.down_proj.bias", (hidden,)),)))
    return specs
