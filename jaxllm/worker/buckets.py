"""Which shapes exist. Every step is padded to one of a few shapes, and all of them are compiled before the first request."""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Bucket:
    """A shape of a step.

    Attributes:
        num_tokens: T.
        num_rows: R.
        decode_only: every row has one token, so T == R.
        num_steps: most tokens that each row decodes, one after the other; only where `decode_only`.
    """

    num_tokens: int
    num_rows: int
    decode_only: bool
    num_steps: int = 1

    def __str__(self) -> str:
        if self.num_steps > 1:
            return f"decode {self.num_rows} x {self.num_steps}"
        return f"decode {self.num_rows}" if self.decode_only else f"mixed {self.num_tokens}"


def doubling(first: int, last: int) -> list[int]:
    """`first`, 2 * `first`, 4 * `first`, … below `last`, and `last` itself."""
    sizes = []
    while first < last:
        sizes.append(first)
        first *= 2
    return [*sizes, last]


class Buckets:
    """The shapes of an engine: decode buckets by rows, mixed ones by tokens, the last exactly `max_num_batched_tokens`.

    Args:
        least_tokens: no step is smaller. 2 where a matrix product with one row is slow (bfloat16 on XLA:CPU).
        decode_sizes, mixed_sizes: instead of the default, which doubles.
        num_decode_steps: if more than 1, every decode bucket is there a second time, with this many steps.

    Raises:
        ValueError: if the sizes do not rise to the limits.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        least_tokens: int = 1,
        decode_sizes: Sequence[int] | None = None,
        mixed_sizes: Sequence[int] | None = None,
        num_decode_steps: int = 1,
    ) -> None:
        decode = list(decode_sizes or doubling(1, max_num_seqs))
        mixed = list(mixed_sizes or doubling(16, max_num_batched_tokens))
        if decode != sorted(set(decode)) or decode[-1] < max_num_seqs:
            raise ValueError(f"decode bucket sizes must rise to max_num_seqs {max_num_seqs}, got {decode}")
        if mixed != sorted(set(mixed)) or mixed[-1] < max_num_batched_tokens:
            raise ValueError(f"mixed bucket sizes must rise to max_num_batched_tokens {max_num_batched_tokens}, got {mixed}")
        self._decode_sizes, self._mixed_sizes = (sorted({max(size, least_tokens) for size in sizes}) for sizes in (decode, mixed))
        self.decode = [Bucket(size, size, True) for size in self._decode_sizes]
        self.multi_step = [Bucket(size, size, True, num_decode_steps) for size in self._decode_sizes if num_decode_steps > 1]
        self.mixed = [Bucket(size, min(size, self._decode_sizes[-1]), False) for size in self._mixed_sizes]

    def __iter__(self):
        """All buckets, the largest of each kind first: that is the order to compile them in."""
        return iter(sorted(self.decode + self.multi_step + self.mixed, key=lambda bucket: -bucket.num_tokens))

    def choose_multi_step(self, num_rows: int) -> Bucket:
        """The smallest bucket in which this many rows decode several tokens each."""
        return self.multi_step[bisect.bisect_left(self._decode_sizes, num_rows)]

    def choose(self, num_scheduled_tokens: np.ndarray, mixed: bool = False) -> Bucket:
        """The smallest bucket for a step that is no step of several decodes.

        Args:
            num_scheduled_tokens: [rows], at least one row, each at least 1.
            mixed: take a mixed bucket even if every row has one token.
        """
        rows, tokens = len(num_scheduled_tokens), int(num_scheduled_tokens.sum())
        if tokens == rows and not mixed:
            return self.decode[bisect.bisect_left(self._decode_sizes, rows)]
        # A mixed bucket has at least as many rows as tokens up to max_num_seqs, so the tokens decide.
        return self.mixed[bisect.bisect_left(self._mixed_sizes, tokens)]
