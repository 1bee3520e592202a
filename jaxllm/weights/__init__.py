"""Checkpoints into sharded arrays: safetensors, GGUF and Orbax, read strictly."""
