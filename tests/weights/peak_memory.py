"""Run by test_load: memory of the process itself (not of mapped files) while three fused parameters of 64 MiB are loaded."""

import sys
import threading
import time
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
from weight_files import finish, gguf_writer, write_safetensors

from jaxllm.layers.spec import ParamSpec, Part
from jaxllm.weights.load import load_params
from jaxllm.weights.source import resolve_model

kind, folder = sys.argv[1], Path(sys.argv[2])
rows, cols, layers = 4096, 2048, 3
names = [[f"model.layers.{i}.mlp.{name}_proj.weight" for name in ("gate", "up")] for i in range(layers)]
if kind == "safetensors":
    values = np.ones((rows, cols), ml_dtypes.bfloat16)
    source = resolve_model(str(write_safetensors(folder, {name: values for pair in names for name in pair})))
else:
    # A Q8_0 block: the scale in float16, then 32 numbers.
    blocks = np.tile(np.frombuffer(np.float16(0.5).tobytes() + bytes([2] * 32), np.uint8), (rows, cols // 32))
    writer = gguf_writer(folder / "m.gguf")
    writer.add_tensor("token_embd.weight", np.ones((32, 64), np.float32))
    for i in range(layers):
        for name in ("gate", "up"):
            writer.add_tensor(f"blk.{i}.ffn_{name}.weight", blocks, raw_dtype=8)
    finish(writer)
    source = resolve_model(str(folder / "m.gguf"))
    import gguf  # noqa: F401 - not part of what is measured
specs = [
    ParamSpec(f"layer{i}", (cols, 2 * rows), "float32", (None, None), tuple(Part(n, (rows, cols)) for n in pair), True, 2)
    for i, pair in enumerate(names)
]
jax.block_until_ready(jax.numpy.ones(8))
if kind == "safetensors":
    del values
else:
    del blocks, writer


def own_memory() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


start = peak = own_memory()
done = threading.Event()


def watch() -> None:
    global peak
    while not done.is_set():
        peak = max(peak, own_memory())
        time.sleep(0.002)


watcher = threading.Thread(target=watch)
watcher.start()
params = load_params(source, specs, ignore=[".*embed.*"])
done.set()
watcher.join()
total = sum(array.nbytes for array in params.values())
assert all((np.asarray(array) == 1).all() for array in params.values())
assert total == layers * (64 << 20)
print(f"parameters {total >> 20} MiB, peak {(peak - start) >> 20} MiB")
assert total - (8 << 20) < peak - start < total + (32 << 20), "a parameter was held twice"
