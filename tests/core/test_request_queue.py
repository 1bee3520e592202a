"""Queues of waiting requests."""

import pytest
from core_builders import ids_of, make_request
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.core.request_queue import FCFSRequestQueue, PriorityRequestQueue, create_request_queue, priority_key


def test_fcfs_order_and_prepend() -> None:
    queue = create_request_queue("fcfs")
    a, b, c, d = (make_request(name, 3, priority=9 - i) for i, name in enumerate("abcd"))
    for request in (a, b, c):
        queue.add(request)
    queue.prepend(d)
    assert ids_of(list(queue)) == ["d", "a", "b", "c"]
    assert queue.peek() is d
    assert [queue.pop(), queue.pop()] == [d, a]
    queue.prepend_all([d, a])
    assert ids_of(list(queue)) == ["d", "a", "b", "c"]
    assert queue.remove("b") is b
    assert (len(queue), "b" in queue, "c" in queue) == (3, False, True)
    assert [queue.pop() for _ in range(3)] == [d, a, c]
    assert not queue


def test_priority_order() -> None:
    queue = create_request_queue("priority")
    # Lower first: priority, then arrival, then the id as a string.
    order = [("z", 0, 9.0), ("b", 1, 1.0), ("10", 1, 2.0), ("9", 1, 2.0), ("a", 2, 0.0)]
    requests = {name: make_request(name, 3, priority=p, arrival_time=t) for name, p, t in order}
    for name in ("9", "a", "10", "z", "b"):
        queue.add(requests[name])
    assert ids_of(list(queue)) == [name for name, _, _ in order]
    assert queue.pop() is requests["z"]
    queue.prepend_all([requests["z"]])
    assert queue.peek() is requests["z"]
    assert queue.remove("10") is requests["10"]
    assert [queue.pop().request_id for _ in range(len(queue))] == ["z", "b", "9", "a"]


@pytest.mark.parametrize("queue", [FCFSRequestQueue(), PriorityRequestQueue()], ids=["fcfs", "priority"])
def test_empty(queue: FCFSRequestQueue | PriorityRequestQueue) -> None:
    assert (len(queue), list(queue), "a" in queue) == (0, [], False)
    for call in (queue.peek, queue.pop):
        with pytest.raises(IndexError):
            call()
    with pytest.raises(KeyError):
        queue.remove("a")
    queue.add(make_request("a", 3))
    queue.remove("a")
    with pytest.raises(IndexError):
        queue.peek()


def test_unknown_policy() -> None:
    with pytest.raises(ValueError, match="scheduling_policy must be one of 'fcfs', 'priority', got 'lifo'"):
        create_request_queue("lifo")


def test_removal_by_priority_does_not_leave_a_growing_heap() -> None:
    queue = PriorityRequestQueue()
    for round_ in range(100):
        queue.add(make_request("again", 3, priority=round_))
        queue.remove("again")
    assert len(queue._heap) <= 17


@given(
    st.lists(st.tuples(st.sampled_from(["add", "pop", "remove", "prepend"]), st.integers(0, 5), st.integers(0, 2)), max_size=40)
)
def test_both_queues_against_a_list(operations: list[tuple[str, int, int]]) -> None:
    fcfs, by_priority, model = FCFSRequestQueue(), PriorityRequestQueue(), []
    for operation, number, priority in operations:
        name = str(number)
        known = next((request for request in model if request.request_id == name), None)
        if operation in ("add", "prepend") and known is None:
            request = make_request(name, 3, priority=priority)
            for queue in (fcfs, by_priority):
                getattr(queue, operation)(request)
            model.insert(0 if operation == "prepend" else len(model), request)
        elif operation == "remove" and known is not None:
            assert fcfs.remove(name) is by_priority.remove(name) is known
            model.remove(known)
        elif operation == "pop" and model:
            least = min(model, key=priority_key)
            assert by_priority.peek() is by_priority.pop() is least
            assert fcfs.remove(least.request_id) is least
            model.remove(least)
        assert list(fcfs) == model
        assert list(by_priority) == sorted(model, key=priority_key)
        assert len(fcfs) == len(by_priority) == len(model)
        if model:
            assert fcfs.peek() is model[0]
