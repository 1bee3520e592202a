"""LoadBalancer: which engine a front end gives a request to. Arithmetic only: no clock, no I/O.

A front end knows of an engine what the last snapshot said, which may be a tenth of a second old, and what it has itself sent
there. Its own requests since the snapshot count as waiting, once for every front end, since the others do the same: else all
that comes between two snapshots would go to the engine that was idle at the first. A request that is in no snapshot yet, or in
none any more, still counts while it is unfinished: no engine has less to do than what this front end knows it to have.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from jaxllm.checks import check_at_least

# A waiting request says more of an engine than a running one: it waits because there is no room.
WAITING_WEIGHT = 4
# How much higher than the least the score of an engine may be that is chosen for the prefixes it has cached: eight waiting
# requests. Beyond that, computing a prefix again is quicker than waiting for it.
PREFIX_SLACK = 8 * WAITING_WEIGHT

_UNAVAILABLE = np.iinfo(np.int64).max


class LoadBalancer:
    """One front end's view of n engines.

    The score of an engine is

        max(waiting * WAITING_WEIGHT + running, unfinished * client_count)

    with `waiting` and `running` of the last snapshot, `client_count` added to `waiting` for each request sent since, and
    `unfinished` the front end's own requests there. The least score wins. Among equals the turn goes round: the search begins one
    engine further each time, so that idle engines are used alike; each front end begins elsewhere.

    Args:
        client_index, client_count: of the front ends that send to the same engines; all are taken to send alike.

    Raises:
        ValueError: if there is no engine, or no such front end.
    """

    def __init__(self, num_engines: int, client_index: int = 0, client_count: int = 1) -> None:
        check_at_least("num_engines", num_engines, 1)
        check_at_least("client_count", client_count, 1)
        if not 0 <= client_index < client_count:
            raise ValueError(f"client_index must be in [0, {client_count - 1}], got {client_index}")
        self.client_count = client_count
        self._waiting = [0] * num_engines
        self._running = [0] * num_engines
        self._unfinished = [0] * num_engines
        self._available = [True] * num_engines
        # Kept up to date, so that choosing among thousands is one search; _UNAVAILABLE of engines that cannot be chosen.
        self._scores = np.zeros(num_engines, np.int64)
        self._start = num_engines * client_index // client_count

    @property
    def num_engines(self) -> int:
        return len(self._waiting)

    @property
    def available(self) -> list[int]:
        """The engines that can be chosen."""
        return [engine for engine, available in enumerate(self._available) if available]

    def unfinished(self, engine: int) -> int:
        """How many of this front end's requests are there."""
        return self._unfinished[engine]

    def score(self, engine: int) -> int:
        """Also of an engine that cannot be chosen."""
        return max(self._waiting[engine] * WAITING_WEIGHT + self._running[engine], self._unfinished[engine] * self.client_count)

    def pick(self, cached: Sequence[int] | np.ndarray | None = None) -> int:
        """Choose the engine for a request, and count the request there.

        Args:
            cached: for each engine, how much of the request's prefix it has cached, in any unit. The engine with the most is
                chosen, among equals by score, unless its score is more than PREFIX_SLACK above the least. None, or nothing
                cached anywhere: by score alone.

        Raises:
            LookupError: if no engine is available.
        """
        scores = self._scores
        engine = self._first_least(scores)
        least = scores[engine]
        if least == _UNAVAILABLE:
            raise LookupError("no engine is available")
        if cached is not None:
            hits = np.where(scores <= least + PREFIX_SLACK, np.asarray(cached), 0)
            if (most := hits.max()) > 0:
                engine = self._first_least(np.where(hits == most, scores, _UNAVAILABLE))
        self._start = (self._start + 1) % self.num_engines
        self.place(engine)
        return engine

    def _first_least(self, scores: np.ndarray) -> int:
        """The first of the least from `_start` on, and on from the beginning."""
        start = self._start
        engine = start + int(scores[start:].argmin())
        if start and scores[before := int(scores[:start].argmin())] < scores[engine]:
            return before
        return engine

    def place(self, engine: int) -> None:
        """Count a request at an engine that was not chosen here."""
        self._waiting[engine] += self.client_count
        self._unfinished[engine] += 1
        self._update_score(engine)

    def finish(self, engine: int, num_requests: int = 1) -> None:
        """Some of this front end's requests there have ended, however they did."""
        assert self._unfinished[engine] >= num_requests, f"engine {engine} has {self._unfinished[engine]} requests"
        self._unfinished[engine] -= num_requests
        self._update_score(engine)

    def update(self, engine: int, waiting: int, running: int) -> None:
        """Take in what a snapshot says of one engine."""
        self._waiting[engine] = waiting
        self._running[engine] = running
        self._update_score(engine)

    def update_all(self, counts: Iterable[tuple[int, int]]) -> None:
        """Take in a snapshot of all engines: (waiting, running) of each."""
        for engine, (waiting, running) in enumerate(counts):
            self.update(engine, waiting, running)

    def set_available(self, engine: int, available: bool) -> None:
        """Whether the engine can be chosen. One that comes or goes has nothing waiting or running, as far as snapshots tell."""
        self._available[engine] = available
        self.update(engine, 0, 0)

    def _update_score(self, engine: int) -> None:
        self._scores[engine] = self.score(engine) if self._available[engine] else _UNAVAILABLE

    def resize(self, num_engines: int) -> None:
        """Add idle engines, available at once, or forget the last ones, whose requests must have ended.

        Raises:
            ValueError: if no engine would be left, or one that goes has unfinished requests.
        """
        check_at_least("num_engines", num_engines, 1)
        if any(self._unfinished[num_engines:]):
            raise ValueError(f"engines from {num_engines} on have unfinished requests: {self._unfinished[num_engines:]}")
        new = max(0, num_engines - self.num_engines)
        self._waiting = self._waiting[:num_engines] + [0] * new
        self._running = self._running[:num_engines] + [0] * new
        self._unfinished = self._unfinished[:num_engines] + [0] * new
        self._available = self._available[:num_engines] + [True] * new
        self._scores = np.concatenate([self._scores[:num_engines], np.zeros(new, np.int64)])
        self._start %= num_engines
