"""When each request of a load test is sent."""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np


@dataclass(frozen=True)
class RampUp:
    """A rate that grows with each request from `start` to `end` requests a second: by equal steps, or by equal factors."""

    strategy: Literal["linear", "exponential"]
    start: float
    end: float

    def __post_init__(self) -> None:
        if not 0 < self.start <= self.end < math.inf:
            raise ValueError(
                "--ramp-up-start-rps must be above 0 and at most --ramp-up-end-rps, which must be finite, "
                f"got {self.start} and {self.end}"
            )

    def rates(self, count: int) -> np.ndarray:
        """[count] requests a second."""
        progress = np.arange(count) / max(count - 1, 1)
        if self.strategy == "linear":
            return self.start + (self.end - self.start) * progress
        return self.start * (self.end / self.start) ** progress


def arrival_times(
    count: int, rate: float, rng: np.random.Generator, *, burstiness: float = 1.0, ramp_up: RampUp | None = None
) -> np.ndarray:
    """Times of `count` requests.

    Gaps follow a gamma distribution of mean 1/rate and shape `burstiness`: 1 is a Poisson process, less is burstier, infinity is
    an even beat. Without a ramp, times are then scaled so that the last one is count/rate exactly, which takes the chance of the
    draw out of the throughput.

    Args:
        rate: requests a second; infinity sends all at once. Not used under a ramp.

    Returns:
        [count] seconds, ascending; the first gap comes before the first request.

    Raises:
        ValueError: naming what is out of range.
    """
    if not rate > 0:
        raise ValueError(f"--request-rate must be above 0, got {rate}")
    if not burstiness > 0:
        raise ValueError(f"--burstiness must be above 0, got {burstiness}")
    if ramp_up is None and math.isinf(rate):
        return np.zeros(count)
    means = 1 / ramp_up.rates(count) if ramp_up is not None else np.full(count, 1 / rate)
    gaps = means if math.isinf(burstiness) else rng.gamma(burstiness, means / burstiness)
    times = np.cumsum(gaps)
    if ramp_up is None and times[-1] > 0:
        times *= count / rate / times[-1]
    return times
