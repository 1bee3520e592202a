import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.bench.arrivals import RampUp, arrival_times

RATES = st.floats(0.01, 1000)


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def test_all_at_once() -> None:
    assert arrival_times(3, math.inf, rng()).tolist() == [0, 0, 0]


def test_even_beat() -> None:
    assert arrival_times(4, 2.0, rng(), burstiness=math.inf) == pytest.approx([0.5, 1.0, 1.5, 2.0])


@given(st.integers(1, 200), RATES, st.floats(0.05, 50) | st.just(math.inf), st.integers(0, 99))
def test_times_ascend_and_end_at_count_over_rate(count: int, rate: float, burstiness: float, seed: int) -> None:
    times = arrival_times(count, rate, np.random.default_rng(seed), burstiness=burstiness)
    assert times.shape == (count,)
    assert (np.diff(times) >= 0).all()
    assert times[0] >= 0
    assert times[-1] == pytest.approx(count / rate)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_spread_of_the_gaps(burstiness: float) -> None:
    """The coefficient of variation of a gamma distribution is 1/√shape; 1 for a Poisson process."""
    gaps = np.diff(arrival_times(20_000, 5.0, rng(), burstiness=burstiness))
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


def test_rates_of_ramps() -> None:
    assert RampUp("linear", 1, 4).rates(4) == pytest.approx([1, 2, 3, 4])
    assert RampUp("exponential", 1, 8).rates(4) == pytest.approx([1, 2, 4, 8])
    assert RampUp("linear", 2, 2).rates(1) == pytest.approx([2])


def test_a_ramp_is_not_rescaled() -> None:
    times = arrival_times(4, math.inf, rng(), burstiness=math.inf, ramp_up=RampUp("exponential", 1, 8))
    assert times == pytest.approx([1, 1.5, 1.75, 1.875])


@given(RATES, st.floats(1, 50), st.sampled_from(["linear", "exponential"]))
def test_ramps_go_up(start: float, factor: float, strategy: str) -> None:
    rates = RampUp(strategy, start, start * factor).rates(20)  # type: ignore[arg-type]
    assert rates[0] == pytest.approx(start)
    assert rates[-1] == pytest.approx(start * factor)
    assert (np.diff(rates) >= -1e-9).all()


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan])
def test_bad_rates(rate: float) -> None:
    with pytest.raises(ValueError, match="--request-rate must be above 0"):
        arrival_times(1, rate, rng())


def test_bad_burstiness() -> None:
    with pytest.raises(ValueError, match="--burstiness must be above 0, got 0"):
        arrival_times(1, 1.0, rng(), burstiness=0)


@pytest.mark.parametrize(("start", "end"), [(0, 1), (2, 1), (1, math.inf), (math.nan, 1)])
def test_bad_ramps(start: float, end: float) -> None:
    with pytest.raises(ValueError, match="--ramp-up-start-rps"):
        RampUp("linear", start, end)
