"""`host --peer`: vLLM's scheduler and output processor beside ours, on the same requests."""

import json
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from jaxllm.bench.report import table
from jaxllm.config import DecoderConfig

# What both sides do. The rest of a step is each model runner's own.
PARTS = ("schedule", "update", "output")
_ERROR_LINES = 5


class Peer:
    """A Python interpreter that has vLLM, and measures there what `measure` of `host` does here.

    Attributes:
        name: of the engine, with versions.
    """

    def __init__(self, process: subprocess.Popen[str], model: Path, errors: Path) -> None:
        self._process, self._model, self._errors = process, model, errors
        about = self._read()
        self.name = f"{about['name']} {about['version']} (Python {about['python']})"

    def measure(self, job: Mapping[str, Any]) -> dict[str, float]:
        """One number of requests; see `peer_vllm.measure` for the job, to which the model is added.

        Returns:
            Milliseconds of each of PARTS, and "cpu".

        Raises:
            ValueError: if the peer fails, with the end of what it said.
        """
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended: there is no answer then, and that is told
            print(json.dumps({**job, "model": str(self._model)}), file=self._process.stdin, flush=True)
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            return json.loads(line)
        lines = self._errors.read_text(errors="replace").splitlines()[-_ERROR_LINES:]
        raise ValueError(f"peer {self._process.args[0]!r} failed: " + ("\n".join(lines) or f"exit {self._process.wait()}"))


@contextmanager
def start_peer(python: str, model: DecoderConfig, max_model_len: int, tokenizer: Any) -> Iterator[Peer]:
    """A peer for as long as the `with` block lasts.

    Args:
        python: the interpreter.
        tokenizer: None to make no text.

    Raises:
        ValueError: if it cannot be run, or has no vLLM.
    """
    with tempfile.TemporaryDirectory(prefix="jaxllm-peer-") as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(_model_config(model, max_model_len)))
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        errors = folder / "errors"
        # Isolated: neither this project's modules nor its environment are the peer's.
        command = [python, "-I", str(Path(__file__).with_name("peer_vllm.py"))]
        with errors.open("w") as stderr:
            try:
                process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True, cwd=folder
                )
            except OSError as error:
                raise ValueError(f"--peer {python!r} cannot be run: {error}") from error
        try:
            yield Peer(process, folder, errors)
        finally:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                with suppress(BrokenPipeError):
                    pipe.close()


def _model_config(model: DecoderConfig, max_model_len: int) -> dict[str, Any]:
    """A small model with this one's vocabulary: no more of it matters to a scheduler."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": model.vocab_size,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "max_position_embeddings": max_model_len,
    }


def peer_table(ours: Mapping[int, Mapping[str, float]], theirs: Mapping[int, Mapping[str, float]], name: str) -> str:
    """Milliseconds of what both do, a row for each number of requests, and how many times ours the peer's sum is."""
    head = ["requests", *(f"{part} ms" for part in PARTS), "sum ms", *PARTS, "sum", "ratio"]
    rows: list[Sequence[object]] = []
    for size, result in ours.items():
        columns: list[str] = []
        sums = []
        for figures in (result, theirs[size]):
            values = [figures[part] for part in PARTS]
            sums.append(sum(values))
            columns += [f"{value:.3f}" for value in (*values, sums[-1])]
        rows.append([size, *columns, f"{sums[1] / sums[0]:.1f}"])
    return f"this engine, then {name}; the ratio is how many times as long the peer takes\n{table(head, rows)}"
