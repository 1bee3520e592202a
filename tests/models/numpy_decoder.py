"""A decoder of the Llama family in plain float64 NumPy: whole sequence at once, full attention matrix, no cache."""

import math

import numpy as np


def logits(config, tensors, token_ids):
    """float64 [T, V] for one sequence; `tensors` by Hugging Face name."""
    tensors = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    x = tensors["model.embed_tokens.weight"][token_ids]
    rotation = rotations(config, len(token_ids))
    for layer, window in enumerate(config.sliding_windows):
        name = f"model.layers.{layer}"
        x = x + attention(
            config, tensors, f"{name}.self_attn", norm(config, tensors, f"{name}.input_layernorm", x), rotation, window
        )
        x = x + mlp(config, tensors, f"{name}.mlp", norm(config, tensors, f"{name}.post_attention_layernorm", x))
    head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    return norm(config, tensors, "model.norm", x) @ tensors[head].T


def norm(config, tensors, name, x):
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + config.rms_norm_eps) * tensors[f"{name}.weight"]


def linear(tensors, name, x):
    return x @ tensors[f"{name}.weight"].T + tensors.get(f"{name}.bias", 0.0)


def attention(config, tensors, name, x, rotation, window):
    count, size = len(x), config.head_dim
    q = linear(tensors, f"{name}.q_proj", x).reshape(count, config.num_heads, size)
    k = linear(tensors, f"{name}.k_proj", x).reshape(count, config.num_kv_heads, size)
    v = linear(tensors, f"{name}.v_proj", x).reshape(count, config.num_kv_heads, size)
    if config.qk_norm:
        q, k = norm(config, tensors, f"{name}.q_norm", q), norm(config, tensors, f"{name}.k_norm", k)
    q, k = rotate(q, rotation), rotate(k, rotation)
    out = np.zeros_like(q)
    for head in range(config.num_heads):
        kv_head = head * config.num_kv_heads // config.num_heads
        scores = q[:, head] @ k[:, kv_head].T / math.sqrt(size)
        distance = np.arange(count)[:, None] - np.arange(count)
        scores[(distance < 0) | (distance >= (window or count))] = -np.inf
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        out[:, head] = weights / weights.sum(axis=-1, keepdims=True) @ v[:, kv_head]
    return linear(tensors, f"{name}.o_proj", out.reshape(count, -1))


def rotate(x, rotation):
    """Dimensions i and i + D/2 of a head are the real and the imaginary part of a number that is turned."""
    half = x.shape[-1] // 2
    turned = (x[..., :half] + 1j * x[..., half:]) * rotation[:, None]
    return np.concatenate([turned.real, turned.imag], axis=-1)


def rotations(config, count):
    """complex [T, D/2]"""
    angle, factor = angles(config.rope, config.head_dim, config.max_position_embeddings)
    return factor * np.exp(1j * np.arange(count)[:, None] * angle)


def angles(rope, size, max_position):
    """(radians a token [D/2], factor on the rotation), pair by pair."""
    theta, factor = rope.theta, 1.0
    if rope.type == "dynamic":
        theta *= (rope.factor * rope.factor - rope.factor + 1) ** (size / (size - 2))
    out = np.array([theta ** (-2 * pair / size) for pair in range(size // 2)])
    if rope.type == "linear":
        out /= rope.factor
    if rope.type == "llama3":
        short, long = rope.original_max_position / rope.high_freq_factor, rope.original_max_position / rope.low_freq_factor
        for pair, wavelength in enumerate(2 * math.pi / out):
            if wavelength > long:
                out[pair] /= rope.factor
            elif wavelength >= short:
                share = (rope.original_max_position / wavelength - rope.low_freq_factor) / (
                    rope.high_freq_factor - rope.low_freq_factor
                )
                out[pair] = (1 - share) * out[pair] / rope.factor + share * out[pair]
    if rope.type == "yarn":
        low, high = (
            size * math.log(rope.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(theta))
            for turns in (rope.beta_fast, rope.beta_slow)
        )
        if rope.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, size - 1)
        for pair in range(size // 2):
            ramp = min(max((pair - low) / (high - low), 0.0), 1.0)
            out[pair] *= (1 - ramp) + ramp / rope.factor

        def scale(m):
            return 0.1 * m * math.log(rope.factor) + 1

        factor = scale(rope.mscale) / scale(rope.mscale_all_dim) if rope.mscale and rope.mscale_all_dim else scale(1.0)
        factor = factor if rope.attention_factor is None else rope.attention_factor
    return out, factor


def gated(config, gate):
    if config.hidden_act == "silu":
        return gate / (1 + np.exp(-gate))
    if config.hidden_act == "gelu":
        return gate * 0.5 * (1 + np.vectorize(math.erf)(gate / math.sqrt(2)))
    return gate * 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))


def mlp(config, tensors, name, x):
    gate, up = linear(tensors, f"{name}.gate_proj", x), linear(tensors, f"{name}.up_proj", x)
    return linear(tensors, f"{name}.down_proj", gated(config, gate) * up)
