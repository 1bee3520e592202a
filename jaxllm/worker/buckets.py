"""Which shapes exist. Every step is padded to one of a few shapes, and all of them are compiled before the first request."""

import bisect
from collections.abc import Container, Sequence
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


# Below these sizes a default size is twice the one before it. Beyond them there are sizes between the powers of two: a finer
# ladder wastes less of the devices' work on padding, and takes longer to compile.
FINE_DECODE_FROM, FINE_MIXED_FROM = 8, 128
DECODE_PARTS = 2


def ladder(first: int, last: int, fine_from: int, parts: int, growth: int = 2) -> list[int]:
    """Sizes from `first`, a power of two, to exactly `last`.

    Each is `growth` times the one before it up to `fine_from`; from there on the way from one power of two to the next has
    `parts` steps.
    """
    sizes = []
    while first < last:
        sizes.append(first)
        power = 1 << (first.bit_length() - 1)
        first += power // parts if power >= fine_from else (growth - 1) * power
    return [*sizes, last]


def coarse_ladders(max_num_seqs: int, max_num_batched_tokens: int) -> tuple[list[int], list[int]]:
    """Sizes of decode and of mixed buckets where the products, nearly all of a step, leave out what is padding."""
    return ladder(1, max_num_seqs, 16, 1, growth=4), ladder(32, max_num_batched_tokens, 128, 1, growth=4)


class Buckets:
    """The shapes of an engine: decode buckets by rows, mixed ones by tokens, the last exactly `max_num_batched_tokens`.

    Args:
        least_tokens: no step is smaller. 2 where a matrix product with one row is slow (bfloat16 on XLA:CPU).
        decode_sizes, mixed_sizes: instead of the default ladders.
        mixed_parts: steps between two powers of two in the default ladder of mixed buckets.
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
        mixed_parts: int = 4,
    ) -> None:
        decode = list(decode_sizes or ladder(1, max_num_seqs, FINE_DECODE_FROM, DECODE_PARTS))
        mixed = list(mixed_sizes or ladder(16, max_num_batched_tokens, FINE_MIXED_FROM, mixed_parts))
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

    def choose_multi_step(self, num_rows: int, ready: Container[Bucket] | None = None) -> Bucket:
        """The smallest bucket in which this many rows decode several tokens each.

        Args:
            ready: take one of these, among which is the largest; None for all.
        """
        return _first_ready(self.multi_step[bisect.bisect_left(self._decode_sizes, num_rows) :], ready)

    def __len__(self) -> int:
        return len(self.decode) + len(self.multi_step) + len(self.mixed)

    @property
    def largest(self) -> list[Bucket]:
        """The largest of each kind: every step fits one of them, so with these an engine can serve."""
        return [self.mixed[-1], self.decode[-1], *self.multi_step[-1:]]

    def choose(self, num_scheduled_tokens: np.ndarray, mixed: bool = False, ready: Container[Bucket] | None = None) -> Bucket:
        """The smallest bucket for a step that is no step of several decodes.

        Args:
            num_scheduled_tokens: [rows], at least one row, each at least 1.
            mixed: take a mixed bucket even if every row has one token.
            ready: take one of these, among which are `largest`; None for all.
        """
        rows, tokens = len(num_scheduled_tokens), int(num_scheduled_tokens.sum())
        if tokens == rows and not mixed:
            fitting = self.decode[bisect.bisect_left(self._decode_sizes, rows) :]
        else:
            # A mixed bucket has at least as many rows as tokens up to max_num_seqs, so the tokens decide.
            fitting = self.mixed[bisect.bisect_left(self._mixed_sizes, tokens) :]
        return _first_ready(fitting, ready)


def _first_ready(fitting: Sequence[Bucket], ready: Container[Bucket] | None) -> Bucket:
    return fitting[0] if ready is None else next(bucket for bucket in fitting if bucket in ready)
