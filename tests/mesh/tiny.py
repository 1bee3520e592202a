"""The model of these tests."""

# Nine query heads for three KV heads, as SmolLM2 has them: only three devices share them without filling up.
TINY = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 2500,
    "hidden_size": 64,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}
