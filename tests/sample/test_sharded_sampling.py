"""Sampling with the rows shared by devices: the same tokens and log probabilities, to the bit."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import re
import jax, numpy as np
from functools import partial
from jax.sharding import NamedSharding, PartitionSpec as P
from jaxllm.sample import sampler, state
from jaxllm.sample.sharded import sample_sharded
from jaxllm.sampling_params import SamplingParams
from sharding.mesh import make_mesh

params = [
    SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_k=7, logprobs=3), SamplingParams(top_p=0.99),
    SamplingParams(repetition_penalty=1.2, min_p=0.01), SamplingParams(logit_bias={5: 9.0}, allowed_token_ids=[5, 900]),
]
mesh = make_mesh(jax.devices(), tensor=4)

def run(run_sampler, V, num_rows, place):
    rows = state.init(6, V, None)
    rows = state.write_rows(rows, {i: state.pack_row(p, [1, 2], 2, V, seed=i) for i, p in enumerate(params)})
    rows = jax.device_put(rows, place(P()))
    logits = np.random.default_rng(0).normal(size=(num_rows, V)).astype(np.float32) * 3

    @jax.jit
    def step(rows, logits, row_ids, positions):
        metadata = state.gather(rows, row_ids)
        return run_sampler(logits, metadata, positions, max_logprobs=5, logprobs_mode="raw_logprobs")

    spec = P(None, "tensor") if V % 4 == 0 else P()
    batch = (np.arange(num_rows, dtype=np.int32), np.full(num_rows, 2, np.int32))
    arguments = (rows, jax.device_put(logits, place(spec)), *jax.device_put(batch, place(P())))
    compiled = step.lower(*arguments).compile()
    return compiled(*arguments), compiled.as_text()

on_mesh = lambda spec: NamedSharding(mesh, spec)
on_one = lambda spec: jax.sharding.SingleDeviceSharding(jax.devices()[0])
# One row on four devices, an uneven share each, an even one; a vocabulary that four share evenly and one that they do not.
for V, num_rows in ((4096, 1), (4096, 6), (4096, 4), (4098, 6)):
    whole, _ = run(sampler.sample, V, num_rows, on_one)
    shared, text = run(partial(sample_sharded, mesh), V, num_rows, on_mesh)
    assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(shared))
    np.testing.assert_array_equal(whole.token_ids, shared.token_ids)
    # The third request alone asks for log probabilities; what others get beside it means nothing.
    for a, b in zip(jax.tree.leaves(whole.logprobs), jax.tree.leaves(shared.logprobs), strict=True):
        np.testing.assert_array_equal(a[2:3], b[2:3])
    moves = sorted(re.findall(r" (all-[a-z-]+?|collective-permute|reduce-scatter)(?:-start)?\\(", text))
    assert moves == (["all-gather", "all-to-all"] if V % 4 == 0 else ["all-gather"]), moves
print("same")
"""


def test_rows_shared_by_four_devices():
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=root, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "same\n"
