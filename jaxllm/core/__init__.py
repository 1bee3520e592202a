"""The scheduler's world: requests, blocks and budgets. Integers only; nothing here imports jax."""
