"""How fast a device could be at most: the bytes that a step must move and the operations that it must do, over what the device
can move and do in a second. No kernel reaches these times; they say what is left to gain."""

from dataclasses import dataclass

from jaxllm.config import ITEMSIZE, EngineConfig
from jaxllm.layers.spec import ParamSpec
from kernels_pallas.aot import Target


@dataclass(frozen=True)
class Roofline:
    """What one device of `num_devices` has to do.

    Attributes:
        weight_bytes: of the weights that a step reads: all but the rows of the embedding that it does not look up.
        layer_flops: operations a token in the matrix products of the layers.
        head_flops: operations a sampled row in the output head.
        attention_flops: operations a query and key, over all layers.
        kv_bytes: of the KV cache, a token.
        hidden_bytes: of a token's hidden state, which all devices have.
        num_layers: each ends its attention and its feed-forward with a sum over the devices.
        sliding_windows: one a layer, None for no window.
    """

    target: Target
    num_devices: int
    peak_flops: float
    weight_bytes: float
    layer_flops: float
    head_flops: float
    attention_flops: float
    kv_bytes: float
    hidden_bytes: float
    num_layers: int
    sliding_windows: tuple[int | None, ...]

    @classmethod
    def of(cls, config: EngineConfig, specs: tuple[ParamSpec, ...], target: Target) -> "Roofline":
        """Of a model with these parameters, shared by the devices that the configuration asks for."""
        decoder, devices = config.model.decoder, config.parallel.tensor_parallel_size
        itemsize = ITEMSIZE[config.model.dtype]
        layers = head = 0.0
        for spec in specs:
            if len(spec.shape) != 2:
                continue
            share = spec.shape[0] * spec.shape[1] / (devices if any(spec.axes) else 1)
            if spec.path.startswith("layers."):
                layers += share
            elif spec.path == "lm_head.table" or decoder.tie_word_embeddings:
                head += share
        cache_heads = max(decoder.num_kv_heads, devices) / devices
        # A multiply-add in float32 keeps the tensor cores out: they round its operands.
        float32_flops = 2.0 * target.num_cores * target.lanes_per_core * target.clock_ghz * 1e9
        return cls(
            target=target,
            num_devices=devices,
            peak_flops=float32_flops if config.model.dtype == "float32" else target.bf16_flops,
            weight_bytes=(layers + head) * itemsize,
            layer_flops=2 * layers,
            head_flops=2 * head,
            attention_flops=4.0 * decoder.num_heads / devices * decoder.head_dim * decoder.num_layers,
            kv_bytes=2.0 * cache_heads * decoder.head_dim * ITEMSIZE[config.kv_cache_dtype] * decoder.num_layers,
            hidden_bytes=float(decoder.hidden_size * itemsize),
            num_layers=decoder.num_layers,
            sliding_windows=decoder.sliding_windows,
        )

    def _visible(self, context: float) -> float:
        """Keys that a query sees, on average over the layers, with `context` before it."""
        return sum(min(context, window or context) for window in self.sliding_windows) / self.num_layers

    def _exchange(self, num_tokens: int) -> float:
        """Seconds for the sums over devices: two a layer, each sending every byte out and back but a device's own."""
        share = 2 * (self.num_devices - 1) / self.num_devices
        return 2 * self.num_layers * share * num_tokens * self.hidden_bytes / self.target.link_bandwidth

    def _products(self, num_tokens: int, num_sampled: int) -> float:
        """Seconds for the products with weights, bound by reading them or by computing."""
        flops = num_tokens * self.layer_flops + num_sampled * self.head_flops
        return max(self.weight_bytes / self.target.memory_bandwidth, flops / self.peak_flops)

    def decode_seconds(self, num_rows: int, context: int) -> float:
        """Of a step that gives each of `num_rows` requests, `context` tokens long, one token more."""
        keys = num_rows * self._visible(context)
        attention = max(keys * self.kv_bytes / self.target.memory_bandwidth, keys * self.attention_flops / self.peak_flops)
        return self._products(num_rows, num_rows) + attention + self._exchange(num_rows)

    def prefill_seconds(self, num_tokens: int) -> float:
        """Of a step that takes in a prompt of `num_tokens`."""
        # Query i sees i + 1 keys: half of all pairs, and half of the pairs within a window of w at its beginning.
        pairs = 0.0
        for window in self.sliding_windows:
            seen = min(num_tokens, window or num_tokens)
            pairs += (seen * (seen + 1) / 2 + (num_tokens - seen) * seen) / self.num_layers
        return self._products(num_tokens, 1) + pairs * self.attention_flops / self.peak_flops + self._exchange(num_tokens)

    @property
    def saturation_rows(self) -> float:
        """B_sat: rows of a decode step from which on the products are bound by computing, no longer by reading the weights."""
        return self.weight_bytes / self.target.memory_bandwidth / ((self.layer_flops + self.head_flops) / self.peak_flops)
