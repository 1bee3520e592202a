"""Run by test_tensor_parallel.py in a process with four simulated devices: prints one line for each number of devices."""

import re

import jax
import numpy as np
import numpy_decoder
from model_helpers import Runner
from test_decoder import TINY, VARIANTS, check, groups_of, prompts_of, random_tensors

from jaxllm.config import DecoderConfig
from sharding.mesh import make_mesh
from sharding.rules import KV_CACHE_AXES, sharding_of


def main() -> None:
    # Two KV heads for three and four devices, and a vocabulary of 50 that none of them share evenly.
    config = DecoderConfig.from_hf({**TINY, **VARIANTS["qwen2"], "mlp_bias": True})
    tensors = random_tensors(config)
    long, short = prompts_of(config, (21, 9))
    expected = [numpy_decoder.logits(config, tensors, ids) for ids in (long, short)]
    for size in (1, 2, 3, 4):
        mesh = make_mesh(jax.devices()[:size], tensor=size)
        runner = Runner(
            config, tensors, block_size=4, max_len=40, num_rows=2, kv_groups=groups_of(config), num_stripes=size, mesh=mesh
        )
        captured, run = [], runner.step
        runner.step = lambda *arguments, captured=captured, run=run: captured.append(arguments) or run(*arguments)
        out = runner.logits(runner.run([long[:20], short[:8]], num_tokens=32))
        check(out[:, : config.vocab_size], np.concatenate([expected[0][:20], expected[1][:8]]))
        out = runner.logits(runner.run([long[20:], short[8:]], decode_only=True))
        check(out[:, : config.vocab_size], np.stack([expected[0][20], expected[1][8]]))
        assert (np.asarray(out[:, config.vocab_size :]) == -np.inf).all()
        assert out.shape[1] == runner.graph.vocab_size == (config.vocab_size if size == 1 else 128 * size)

        for spec, weight in zip(runner.graph.specs, runner.weights, strict=True):
            shared = size if any(spec.axes) else 1
            assert weight.addressable_shards[0].data.size * shared == weight.size, spec.path
        for cache in runner.caches:
            assert cache.sharding.is_equivalent_to(sharding_of(mesh, KV_CACHE_AXES), 5)
            assert cache.addressable_shards[0].data.shape[2] == -(-config.num_kv_heads // size)
        placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), captured[-1][:2])
        inputs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), captured[-1][2:])
        compiled = run.lower(*placed, *inputs).compile()
        reduces = len(re.findall(r" all-reduce(?:-start)?\(", compiled.as_text()))
        moves = re.findall(r" (all-gather|all-to-all|collective-permute)(?:-start)?\(", compiled.as_text())
        memory = compiled.memory_analysis()
        assert memory.alias_size_in_bytes == sum(cache.nbytes for cache in runner.caches) // size
        # One of the token embedding, two of each layer.
        assert reduces == (1 + 2 * config.num_layers if size > 1 else 0), reduces
        assert not moves, moves
        print(f"{size} devices: same logits, {reduces} all-reduces")


if __name__ == "__main__":
    main()
