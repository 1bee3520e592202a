"""Logits to token ids, all inside jit. Nothing here starts a backend on import; `limits` does not even import jax."""
