"""The rule by hand, and against a plain restatement of it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.core.load_balancer import PREFIX_SLACK, LoadBalancer


def picks(balancer: LoadBalancer, count: int) -> list[int]:
    return [balancer.pick() for _ in range(count)]


def scores_of(balancer: LoadBalancer) -> list[int]:
    return [balancer.score(engine) for engine in range(balancer.num_engines)]


def test_score_by_hand() -> None:
    balancer = LoadBalancer(3)
    balancer.update_all([(1, 0), (0, 3), (0, 5)])
    assert scores_of(balancer) == [4, 3, 5]
    assert balancer.pick() == 1  # 3
    assert scores_of(balancer) == [4, 7, 5]  # the one sent counts as waiting
    assert picks(balancer, 2) == [0, 2]  # 4, then 5
    assert scores_of(balancer) == [8, 7, 9]
    balancer.update_all([(0, 2), (0, 4), (0, 6)])  # they run
    assert scores_of(balancer) == [2, 4, 6]


def test_ties_go_round() -> None:
    balancer = LoadBalancer(3)
    assert picks(balancer, 7) == [0, 1, 2, 0, 1, 2, 0]
    # Each request ends before the next one comes, and every snapshot says so: idle engines are used alike.
    balancer = LoadBalancer(3)
    found = []
    for _ in range(6):
        found.append(balancer.pick())
        balancer.finish(found[-1])
        balancer.update_all([(0, 0)] * 3)
    assert found == [0, 1, 2, 0, 1, 2]


def test_turn_goes_on_even_if_there_was_no_tie() -> None:
    balancer = LoadBalancer(2)
    balancer.update_all([(5, 0), (0, 0)])
    assert balancer.pick() == 1
    balancer.update_all([(0, 1), (0, 1)])
    assert balancer.pick() == 1  # the search begins at 1 now


@pytest.mark.parametrize(("client_index", "first"), [(0, 0), (1, 1), (2, 2), (3, 3)])
def test_front_ends_begin_elsewhere(client_index: int, first: int) -> None:
    assert LoadBalancer(4, client_index, 4).pick() == first
    assert LoadBalancer(8, client_index, 4).pick() == 2 * first
    assert LoadBalancer(2, client_index, 4).pick() == first // 2


def test_several_front_ends_count_for_each_other() -> None:
    balancer = LoadBalancer(2, 0, 4)
    balancer.update_all([(0, 0), (3, 3)])
    assert balancer.pick() == 0
    # Its own request, and those that the three others are taken to have sent: 4 waiting.
    assert scores_of(balancer) == [16, 15]
    assert balancer.pick() == 1


def test_stale_snapshot_forgets_no_request() -> None:
    balancer = LoadBalancer(2)
    for _ in range(6):
        balancer.place(0)
    # Taken before any of the six arrived.
    balancer.update_all([(0, 0), (0, 5)])
    assert scores_of(balancer) == [6, 5]
    assert balancer.pick() == 1
    balancer.finish(0, 4)
    assert balancer.unfinished(0) == 2
    balancer.update_all([(0, 0), (0, 6)])
    assert scores_of(balancer) == [2, 6]


def test_one_snapshot_for_a_burst() -> None:
    balancer = LoadBalancer(2)
    balancer.update_all([(0, 8), (0, 0)])
    # By hand: 8 against 0, 4, 8 (a tie, the search begins at 0), then 12 against 8, and in turn from there.
    assert picks(balancer, 6) == [1, 1, 0, 1, 0, 1]


def test_engine_that_is_gone() -> None:
    balancer = LoadBalancer(3)
    balancer.update_all([(0, 1), (0, 2), (0, 0)])
    balancer.set_available(2, False)
    assert balancer.available == [0, 1]
    assert picks(balancer, 3) == [0, 1, 0]
    balancer.set_available(2, True)
    assert balancer.pick() == 2
    for engine in range(3):
        balancer.set_available(engine, False)
    with pytest.raises(LookupError, match="no engine is available"):
        balancer.pick()


def test_prefix() -> None:
    balancer = LoadBalancer(3)
    balancer.update_all([(0, 0), (0, PREFIX_SLACK), (0, 10)])
    assert balancer.pick([0, 3, 2]) == 1  # just not overloaded
    assert balancer.pick([0, 3, 2]) == 2  # 1 is, now; 2 has the most of the rest
    assert balancer.pick([0, 0, 0]) == 0
    balancer.update_all([(0, 3), (0, 2), (0, 4)])
    assert balancer.pick([5, 5, 0]) == 1  # as much cached, less to do
    balancer.set_available(1, False)
    assert balancer.pick([1, 5, 0]) == 0


def test_prefix_of_an_engine_that_is_gone_is_worth_nothing() -> None:
    balancer = LoadBalancer(2)
    balancer.set_available(0, False)
    assert balancer.pick([9, 0]) == 1


def test_resize() -> None:
    balancer = LoadBalancer(1)
    assert balancer.pick() == 0
    balancer.resize(3)
    assert balancer.num_engines == 3
    assert sorted(picks(balancer, 2)) == [1, 2]
    with pytest.raises(ValueError, match=r"engines from 2 on have unfinished requests: \[1\]"):
        balancer.resize(2)
    balancer.finish(2)
    balancer.resize(2)
    assert balancer.unfinished(0) == balancer.unfinished(1) == 1
    with pytest.raises(ValueError, match="num_engines must be an integer of at least 1, got 0"):
        balancer.resize(0)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((0,), "num_engines must be an integer of at least 1, got 0"),
        ((1, 0, 0), "client_count must be an integer of at least 1, got 0"),
        ((1, 2, 2), r"client_index must be in \[0, 1\], got 2"),
    ],
)
def test_mistakes(args: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LoadBalancer(*args)


LOADS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=4, max_size=4)
EVENT = st.one_of(st.none(), st.integers(0, 3), LOADS, st.tuples(st.integers(0, 3), st.booleans()))


@given(st.lists(EVENT, max_size=40), st.integers(1, 3), st.data())
def test_against_the_rule_in_plain_words(events: list, client_count: int, data: st.DataObject) -> None:
    client_index = data.draw(st.integers(0, client_count - 1))
    balancer = LoadBalancer(4, client_index, client_count)
    loads, unfinished, available = [[0, 0] for _ in range(4)], [0] * 4, [True] * 4
    turn = 4 * client_index // client_count
    for event in events:
        if event is None:  # a request
            best = None
            for offset in range(4):
                engine = (turn + offset) % 4
                waiting, running = loads[engine]
                score = max(4 * waiting + running, client_count * unfinished[engine])
                if available[engine] and (best is None or score < best[0]):
                    best = score, engine
            if best is None:
                with pytest.raises(LookupError):
                    balancer.pick()
                continue
            turn = (turn + 1) % 4
            assert balancer.pick() == best[1]
            loads[best[1]][0] += client_count
            unfinished[best[1]] += 1
        elif isinstance(event, int):  # one ends
            if unfinished[event]:
                balancer.finish(event)
                unfinished[event] -= 1
        elif isinstance(event, list):  # a snapshot
            balancer.update_all(event)
            loads = [list(load) for load in event]
        else:
            balancer.set_available(*event)
            available[event[0]] = event[1]
            loads[event[0]] = [0, 0]
    assert [balancer.unfinished(engine) for engine in range(4)] == unfinished


@given(st.integers(1, 8), st.integers(1, 300))
def test_alike_engines_get_alike_loads(num_engines: int, num_requests: int) -> None:
    balancer = LoadBalancer(num_engines)
    counts = np.bincount(picks(balancer, num_requests), minlength=num_engines)
    assert counts.max() - counts.min() <= 1
