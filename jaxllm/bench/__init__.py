"""Benchmarks: `python -m jaxllm.bench serve | sweep | throughput | latency | startup`.

`serve` and `sweep` measure any OpenAI server over HTTP and never import jax; the others drive this engine itself.
"""
