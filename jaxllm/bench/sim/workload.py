"""What a simulation asks: lengths, arrival times and shared prefixes of many requests, as arrays."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxllm.bench.arrivals import arrival_times

# Hashes of blocks are numbers. Each request has a range of its own, so that none meets another's by chance; those of prefixes and
# of traces are negative.
_OWN_BLOCKS = 1 << 32


@dataclass(frozen=True)
class Workload:
    """Requests in the order of their arrival.

    Attributes:
        times: float64 [n], seconds, ascending.
        prompt_lens, output_lens: int64 [n].
        prefixes: int64 [n], which of the shared prefixes a prompt begins with; -1 for none.
        prefix_len: tokens of each shared prefix.
        traces: for a trace, the ids of each prompt's chunks of `chunk_size` tokens; equal ids stand for equal tokens.
    """

    times: np.ndarray
    prompt_lens: np.ndarray
    output_lens: np.ndarray
    prefixes: np.ndarray
    prefix_len: int = 0
    traces: Sequence[Sequence[int]] | None = None
    chunk_size: int = 16

    def __len__(self) -> int:
        return len(self.times)

    def prompt_hashes(self, index: int, block_size: int) -> Sequence[int]:
        """One number for each full block of a prompt: equal to another's if the prompts are equal up to the end of the block."""
        num_blocks = int(self.prompt_lens[index]) // block_size
        if self.traces is not None:
            return self._trace_hashes(index, block_size, num_blocks)
        first = index * _OWN_BLOCKS
        prefix = int(self.prefixes[index])
        if prefix < 0:
            return range(first, first + num_blocks)
        num_shared = min(self.prefix_len // block_size, num_blocks)
        shared = -(prefix + 1) * _OWN_BLOCKS
        return [*range(shared, shared + num_shared), *range(first + num_shared, first + num_blocks)]

    def output_hash(self, index: int, block_size: int) -> int:
        """The number of the first block that the output fills."""
        return index * _OWN_BLOCKS + int(self.prompt_lens[index]) // block_size

    def _trace_hashes(self, index: int, block_size: int, num_blocks: int) -> Sequence[int]:
        assert self.traces is not None
        ids, size = self.traces[index], self.chunk_size
        hashes, chain, used = [], 0, 0
        own = index * _OWN_BLOCKS
        for block in range(num_blocks):
            needed = -(-(block + 1) * block_size // size)
            if needed > len(ids):
                # Tokens behind the last id are nobody else's.
                return [*hashes, *range(own + block, own + num_blocks)]
            chain = hash((chain, *ids[used:needed]))
            used = needed
            hashes.append(-1 - (chain & ((1 << 62) - 1)))
        return hashes


def sample(
    count: int,
    rate: float,
    seed: int,
    *,
    input_len: int,
    output_len: int,
    ratios: tuple[float, float] = (0.0, 0.0),
    num_prefixes: int = 0,
    prefix_len: int = 0,
    burstiness: float = 1.0,
) -> Workload:
    """Requests at random: lengths uniform between (1 - ratio) and (1 + ratio) times the length, gamma arrivals, even prefixes.

    Args:
        rate: requests a second; infinity for all at once.
        ratios: of prompts and outputs.
        prefix_len: tokens that each of `num_prefixes` groups of prompts begins with, part of `input_len`.

    Raises:
        ValueError: naming what is out of range.
    """
    for name, value in (("--num-requests", count), ("--input-len", input_len), ("--output-len", output_len)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if num_prefixes < 0 or prefix_len < 0 or (num_prefixes > 0) != (prefix_len > 0):
        raise ValueError(
            f"--num-prefixes and --prefix-len go together and must not be negative, got {num_prefixes} and {prefix_len}"
        )
    rng = np.random.default_rng(seed)
    times = arrival_times(count, rate, rng, burstiness=burstiness)

    def lens(length: int, ratio: float) -> np.ndarray:
        return rng.integers(max(1, math.floor(length * (1 - ratio))), math.ceil(length * (1 + ratio)), endpoint=True, size=count)

    prompts, outputs = lens(input_len, ratios[0]), lens(output_len, ratios[1])
    if num_prefixes and prompts.min() <= prefix_len:
        raise ValueError(f"--prefix-len {prefix_len} must be less than the shortest prompt, {prompts.min()} tokens")
    prefixes = rng.integers(num_prefixes, size=count) if num_prefixes else np.full(count, -1)
    return Workload(times, prompts, outputs, prefixes, prefix_len)


def load_trace(path: str, count: int | None = None, chunk_size: int = 16, scale: float = 1.0) -> Workload:
    """A trace in the format of the data set `timed_trace`: JSON lines with timestamp, input_length, output_length and, if they
    are known, hash_ids.

    Args:
        count: take no more than its first.
        chunk_size: tokens that a hash id stands for.
        scale: seconds of one unit of its times.

    Raises:
        ValueError: naming the file, the line and what is wrong with it.
    """
    rows: list[tuple[float, int, int, list[int]]] = []
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ValueError(f"--trace {path}: {error.strerror}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip() or len(rows) == count:
            continue
        try:
            row = json.loads(line)
            rows.append(
                (
                    float(row["timestamp"]) * scale,
                    int(row["input_length"]),
                    int(row["output_length"]),
                    [int(i) for i in row.get("hash_ids", ())],
                )
            )
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"--trace {path}, line {number}: {error!r}") from error
        if rows[-1][1] < 1 or rows[-1][2] < 1 or not math.isfinite(rows[-1][0]):
            raise ValueError(f"--trace {path}, line {number}: lengths must be at least 1 and times finite, got {line}")
    if not rows:
        raise ValueError(f"--trace {path}: no requests")
    rows.sort(key=lambda row: row[0])
    times = np.array([row[0] for row in rows])
    return Workload(
        times - times[0],
        np.array([row[1] for row in rows]),
        np.array([row[2] for row in rows]),
        np.full(len(rows), -1),
        traces=[row[3] for row in rows],
        chunk_size=chunk_size,
    )


def write_trace(path: str, workload: Workload, chunk_size: int = 16) -> None:
    """The same requests as a file that `load_trace` and the data set `timed_trace` of the load client read.

    Raises:
        ValueError: if the file cannot be written.
    """
    next_id = 0
    shared: dict[tuple[int, int], int] = {}
    try:
        with Path(path).open("w", encoding="utf-8") as file:
            for index in range(len(workload)):
                num_chunks = -(-int(workload.prompt_lens[index]) // chunk_size)
                if workload.traces is not None:
                    ids = list(workload.traces[index])
                else:
                    prefix = int(workload.prefixes[index])
                    num_shared = 0 if prefix < 0 else workload.prefix_len // chunk_size
                    ids = []
                    for chunk in range(num_chunks):
                        if chunk < num_shared and (prefix, chunk) in shared:
                            ids.append(shared[prefix, chunk])
                            continue
                        if chunk < num_shared:
                            shared[prefix, chunk] = next_id
                        ids.append(next_id)
                        next_id += 1
                row = {
                    "timestamp": float(workload.times[index]),
                    "input_length": int(workload.prompt_lens[index]),
                    "output_length": int(workload.output_lens[index]),
                    "hash_ids": ids,
                }
                file.write(json.dumps(row) + "\n")
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}") from error
