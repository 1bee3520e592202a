"""How long a step takes: from a device's data sheet, or from a table that was measured."""

import bisect
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxllm.config import ITEMSIZE, DecoderConfig
from jaxllm.core.kv_cache_interface import KVCacheSpec
from jaxllm.worker.buckets import Buckets


@dataclass(frozen=True)
class Device:
    """One accelerator.

    Attributes:
        flops: dense 16-bit multiply-adds count two, a second. Data sheet.
        bandwidth: bytes of device memory a second. Data sheet.
        memory: bytes.
        link: bytes a second to its neighbours, one way. Data sheet.
        compute_efficiency, memory_efficiency: the shares of the two that large products and streams reach. Assumed, from
            published kernel figures; not measured with this engine.
        link_latency: seconds of one all-reduce of few bytes. Assumed.
        launch_time: seconds of a step beside its products and streams: small kernels, gaps between kernels. Assumed.
    """

    flops: float
    bandwidth: float
    memory: float
    link: float
    compute_efficiency: float = 0.7
    memory_efficiency: float = 0.8
    link_latency: float = 10e-6
    launch_time: float = 0.4e-3


DEVICES = {
    "a100": Device(312e12, 2.04e12, 80e9, 300e9),
    "h100": Device(989e12, 3.35e12, 80e9, 450e9),
    "h200": Device(989e12, 4.8e12, 141e9, 450e9),
    "b200": Device(2250e12, 8.0e12, 180e9, 900e9),
}


def num_layer_weights(model: DecoderConfig) -> int:
    """Weights of all layers that every token is multiplied with."""
    attention = model.hidden_size * model.head_dim * (2 * model.num_heads + 2 * model.num_kv_heads)
    return model.num_layers * (attention + 3 * model.hidden_size * model.intermediate_size)


class Roofline:
    """The time of the products is that of their arithmetic or of reading their weights, whichever is longer; likewise attention.

    T tokens, R rows, both padded to the engine's bucket; c context tokens, p pairs of query and key:

        layers     max(2 · weights · T / flops, bytes of weights / bandwidth)
        logits     max(2 · V · M · R / flops, bytes of V · M / bandwidth)
        attention  max(4 · L · H · D · p / flops, bytes of K and V of c tokens / bandwidth)
        tensor parallel: 2 all-reduces a layer of T · M, each latency + 2 · (n - 1) / n · bytes / link
        launch     a constant

    Weights, heads and vocabulary are shared evenly by the `tensor_parallel_size` devices.

    Raises:
        ValueError: if the model has sliding windows: what their rows read is not the sum of their contexts.
    """

    def __init__(
        self, device: Device, model: DecoderConfig, dtype: str, tensor_parallel_size: int = 1, buckets: Buckets | None = None
    ) -> None:
        if any(window is not None for window in model.sliding_windows):
            raise ValueError(f"the roofline model knows no sliding windows, which {model.architecture} has here")
        n, itemsize = tensor_parallel_size, ITEMSIZE[dtype]
        flops = device.flops * device.compute_efficiency * n * (0.5 if itemsize == 4 else 1.0)
        bandwidth = device.bandwidth * device.memory_efficiency * n
        weights, head = num_layer_weights(model), model.vocab_size * model.hidden_size
        self._layer_flops, self._layer_read = 2 * weights / flops, weights * itemsize / bandwidth
        self._head_flops, self._head_read = 2 * head / flops, head * itemsize / bandwidth
        self._pair = 4 * model.num_layers * model.num_heads * model.head_dim / flops
        self._context = kv_bytes_per_token(model, dtype) / bandwidth
        self._constant = device.launch_time
        self._token_link = 0.0
        if n > 1:
            self._constant += 2 * model.num_layers * device.link_latency
            self._token_link = 2 * model.num_layers * 2 * (n - 1) / n * model.hidden_size * itemsize / device.link
        self._sizes = _BucketSizes(buckets) if buckets is not None else None

    def __call__(self, num_tokens: int, num_rows: int, num_context_tokens: int, num_pairs: int) -> float:
        if self._sizes is not None:
            num_tokens, num_rows = self._sizes.padded(num_tokens, num_rows)
        layers, head = self._layer_flops * num_tokens, self._head_flops * num_rows
        attention, context = self._pair * num_pairs, self._context * num_context_tokens
        return (
            (layers if layers > self._layer_read else self._layer_read)
            + (head if head > self._head_read else self._head_read)
            + (attention if attention > context else context)
            + self._token_link * num_tokens
            + self._constant
        )


def kv_bytes_per_token(model: DecoderConfig, dtype: str) -> int:
    """Bytes that all layers keep for a token, over all devices."""
    return model.num_layers * 2 * model.num_kv_heads * model.head_dim * ITEMSIZE[dtype]


def num_kv_blocks(
    device: Device, model: DecoderConfig, dtype: str, tensor_parallel_size: int, block_size: int, memory_utilization: float
) -> int:
    """Blocks that fit beside the weights.

    Raises:
        ValueError: if the weights leave no room.
    """
    itemsize = ITEMSIZE[dtype]
    embeddings = model.vocab_size * model.hidden_size * (1 if model.tie_word_embeddings else 2)
    weights = (num_layer_weights(model) + embeddings) * itemsize
    free = device.memory * memory_utilization * tensor_parallel_size - weights
    page = KVCacheSpec(block_size, model.num_kv_heads, model.head_dim, itemsize).page_bytes
    blocks = int(free // (page * model.num_layers))
    if blocks < 2:
        raise ValueError(
            f"{weights / 1e9:.0f} GB of weights leave no room for a KV cache on --tensor-parallel-size {tensor_parallel_size} "
            f"devices of {device.memory / 1e9:.0f} GB"
        )
    return blocks


class _BucketSizes:
    """Padded sizes, quickly."""

    def __init__(self, buckets: Buckets) -> None:
        self._decode = [bucket.num_rows for bucket in buckets.decode]
        self._mixed = [bucket.num_tokens for bucket in buckets.mixed]
        self._mixed_rows = [bucket.num_rows for bucket in buckets.mixed]

    def padded(self, num_tokens: int, num_rows: int) -> tuple[int, int]:
        if num_tokens == num_rows:
            size = self._decode[bisect.bisect_left(self._decode, num_rows)]
            return size, size
        index = bisect.bisect_left(self._mixed, num_tokens)
        return self._mixed[index], self._mixed_rows[index]


@dataclass(frozen=True)
class StepTable:
    """Step times of one engine on one machine, as the command `measure-steps` writes them.

    A step of a bucket takes base + context · (context tokens) + pair · (query-key pairs) seconds.

    Attributes:
        decode, mixed: bucket size → (base, context, pair).
        about: what was measured; the engine's limits among it.
    """

    decode: Mapping[int, tuple[float, float, float]]
    mixed: Mapping[int, tuple[float, float, float]]
    about: Mapping[str, Any]

    def __post_init__(self) -> None:
        for kind in ("decode", "mixed"):
            rows = getattr(self, kind)
            if not rows:
                raise ValueError(f"a step table needs at least one {kind} size, got {dict(rows)}")
            for size, row in rows.items():
                if size < 1 or len(row) != 3 or any(value < 0 for value in row) or row[0] <= 0:
                    raise ValueError(f"a row of a step table is [base > 0, context >= 0, pair >= 0], got {kind} {size}: {row}")
        object.__setattr__(self, "_decode", [(size, *self.decode[size]) for size in sorted(self.decode)])
        object.__setattr__(self, "_mixed", [(size, *self.mixed[size]) for size in sorted(self.mixed)])

    def __call__(self, num_tokens: int, num_rows: int, num_context_tokens: int, num_pairs: int) -> float:
        rows = self._decode if num_tokens == num_rows else self._mixed  # type: ignore[attr-defined]
        index = bisect.bisect_left(rows, (num_tokens,))
        size, base, context, pair = rows[min(index, len(rows) - 1)]
        # Beyond the largest size that was measured, in proportion.
        scale = num_tokens / size if num_tokens > size else 1.0
        return base * scale + context * num_context_tokens + pair * num_pairs

    @classmethod
    def load(cls, path: str) -> "StepTable":
        """Raises ValueError naming the file and what is wrong with it."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            tables = {kind: {int(k): tuple(map(float, v)) for k, v in data[kind].items()} for kind in ("decode", "mixed")}
            return cls(**tables, about=dict(data.get("about", {})))
        except OSError as error:
            raise ValueError(f"--step-table {path}: {error.strerror}") from error
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"--step-table {path}: no table of step times: {error!r}") from error

    def to_json(self) -> dict[str, Any]:
        return {
            "about": dict(self.about),
            "decode": {str(size): list(row) for size, row in self.decode.items()},
            "mixed": {str(size): list(row) for size, row in self.mixed.items()},
        }
