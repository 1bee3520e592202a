"""Programs on disk, across engines of one folder."""

import ctypes
import json
import os
from pathlib import Path

import jax
import pytest
from tiny_configs import LAYER_1

from jaxllm import LLM, SamplingParams
from jaxllm.worker import program_cache
from jaxllm.worker.program_cache import trim_heap


def test_a_program_that_jax_itself_had_kept_can_be_kept_and_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA:CPU cannot serialize a program a second time: what jax's own cache gives must not become a file of ours.

    The source changes, but not the step: jax would find the step that it kept for the first engine.
    """
    (tmp_path / "config.json").write_text(json.dumps(LAYER_1))

    def answer() -> list[int]:
        jax.clear_caches()  # as in another process
        with LLM(
            str(tmp_path),
            load_format="dummy",
            skip_tokenizer_init=True,
            use_tqdm_on_load=False,
            max_num_seqs=1,
            max_num_batched_tokens=2,
            block_size=4,
            num_gpu_blocks_override=64,
            compilation_cache_dir=str(tmp_path / "compiled"),
            background_compilation=False,
        ) as llm:
            params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
            (output,) = llm.generate([{"prompt_token_ids": [5, 6, 7]}], params, use_tqdm=False)
        return list(output.outputs[0].token_ids)

    first = answer()
    monkeypatch.setattr(program_cache, "source_digest", lambda: "another version")
    assert answer() == first
    assert len(list((tmp_path / "compiled").glob("*.program"))) == 4
    assert answer() == first
    for program in (tmp_path / "compiled").glob("*.program"):
        program.unlink()
    assert answer() == first
    assert answer() == first


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library has no malloc_trim")
def test_freed_memory_goes_back_to_the_system() -> None:
    """Blocks below one that is still held: the heap cannot shrink over it, and would keep them."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]

    def resident_mb() -> float:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    size, count = 60_000, 2_000  # in pieces that malloc takes from its heap, not from the system
    blocks = [libc.malloc(size) for _ in range(count)]
    for block in blocks:
        ctypes.memset(block, 1, size)
    last = libc.malloc(size)
    before = resident_mb()
    for block in blocks:
        libc.free(block)
    trim_heap()
    freed = before - resident_mb()
    libc.free(last)
    assert freed > 0.8 * size * count / 2**20
