"""What the prefix cache gains and loses, and an index of which engine has what: so that a request can go where its prefix is.

Blocks are known by the first 64 bits of their hash. Two prefixes that share these are as good as impossible, and would cost no
more than one request a slower start.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np


def short_hash(block_hash: bytes) -> int:
    """The first 64 bits."""
    return int.from_bytes(block_hash[:8], "little")


@dataclass(slots=True)
class KVEvents:
    """What has changed since the last ones.

    Attributes:
        stored: uint64 [n], short hashes of blocks that can be found now and could not before.
        removed: uint64 [m], of those that cannot be found any more.
        cleared: everything was forgotten before that.
    """

    stored: np.ndarray
    removed: np.ndarray
    cleared: bool = False


class KVEventLog:
    """Notes events, and tells what came of all of them together."""

    def __init__(self) -> None:
        self._is_stored: dict[bytes, bool] = {}  # the last event of each block
        self._cleared = False

    def note_stored(self, block_hash: bytes) -> None:
        self._is_stored[block_hash] = True

    def note_removed(self, block_hash: bytes) -> None:
        self._is_stored[block_hash] = False

    def note_cleared(self) -> None:
        self._is_stored.clear()
        self._cleared = True

    def take(self) -> KVEvents | None:
        """What has changed since the last time; None if nothing has."""
        if not (self._is_stored or self._cleared):
            return None
        found, self._is_stored = self._is_stored, {}
        cleared, self._cleared = self._cleared, False
        return KVEvents(
            np.array([short_hash(key) for key, stored in found.items() if stored], np.uint64),
            np.array([short_hash(key) for key, stored in found.items() if not stored], np.uint64),
            cleared,
        )


class PrefixIndex:
    """Which of several engines has which block, as their events tell."""

    def __init__(self, num_engines: int) -> None:
        self.num_engines = num_engines
        self._engines: dict[int, int] = {}  # short hash → a bit for each engine that has the block

    def __len__(self) -> int:
        """Blocks that any engine has."""
        return len(self._engines)

    def update(self, engine: int, events: KVEvents) -> None:
        """Take in what has changed in one engine."""
        bit = 1 << engine
        if events.cleared:
            self.forget(engine)
        for key in events.stored.tolist():
            self._engines[key] = self._engines.get(key, 0) | bit
        self._remove(events.removed.tolist(), bit)

    def forget(self, engine: int) -> None:
        """Nothing is cached there any more."""
        self._remove(list(self._engines), 1 << engine)

    def _remove(self, keys: Iterable[int], bit: int) -> None:
        for key in keys:
            if left := self._engines.get(key, 0) & ~bit:
                self._engines[key] = left
            else:
                self._engines.pop(key, None)

    def cached_blocks(self, block_hashes: Sequence[bytes]) -> np.ndarray:
        """int64 [num_engines]: how many of the first blocks of a prompt each engine has.

        Args:
            block_hashes: of the prompt's full blocks, in order.
        """
        counts = np.zeros(self.num_engines, np.int64)
        having = (1 << self.num_engines) - 1
        for count, block_hash in enumerate(block_hashes):
            still = having & self._engines.get(short_hash(block_hash), 0)
            if still != having:
                for engine in _bits(having & ~still):
                    counts[engine] = count
                having = still
                if not having:
                    return counts
        for engine in _bits(having):
            counts[engine] = len(block_hashes)
        return counts


def _bits(mask: int) -> Iterable[int]:
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest
