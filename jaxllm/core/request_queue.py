"""Queues of waiting requests: first come, first served, or by priority. Both find and remove a request by id."""

import heapq
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Iterator

from jaxllm.checks import check_choice
from jaxllm.config import SchedulingPolicy
from jaxllm.core.request import Request


class RequestQueue(ABC):
    """What the scheduler needs of a queue. Iteration gives the order of service."""

    @abstractmethod
    def add(self, request: Request) -> None:
        """Queue a request that has just arrived."""

    @abstractmethod
    def prepend(self, request: Request) -> None:
        """Queue a request that was served before, ahead of those that were not if the policy lets it."""

    @abstractmethod
    def peek(self) -> Request:
        """The next request to serve. IndexError if there is none."""

    @abstractmethod
    def pop(self) -> Request:
        """Remove and return the next request to serve. IndexError if there is none."""

    @abstractmethod
    def remove(self, request_id: str) -> Request:
        """Remove and return a request wherever it stands. KeyError if it is not here."""

    @abstractmethod
    def __contains__(self, request_id: str) -> bool: ...

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __iter__(self) -> Iterator[Request]: ...

    def prepend_all(self, requests: Iterable[Request]) -> None:
        """Put requests that were popped back in front, the first of them first."""
        for request in reversed(list(requests)):
            self.prepend(request)


class FCFSRequestQueue(RequestQueue):
    """First come, first served. An ordered dict: a deque that also removes from its middle in O(1)."""

    def __init__(self) -> None:
        self._requests: OrderedDict[str, Request] = OrderedDict()

    def add(self, request: Request) -> None:
        self._requests[request.request_id] = request

    def prepend(self, request: Request) -> None:
        self._requests[request.request_id] = request
        self._requests.move_to_end(request.request_id, last=False)

    def peek(self) -> Request:
        for request in self._requests.values():
            return request
        raise IndexError("peek at an empty queue")

    def pop(self) -> Request:
        if not self._requests:
            raise IndexError("pop from an empty queue")
        return self._requests.popitem(last=False)[1]

    def remove(self, request_id: str) -> Request:
        return self._requests.pop(request_id)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())


def priority_key(request: Request) -> tuple[int, float, str]:
    """Lower is served first: by priority, then arrival, then id."""
    return request.priority, request.arrival_time, request.request_id


# The serial number keeps two entries from comparing their requests.
_Entry = tuple[tuple[int, float, str], int, Request]


class PriorityRequestQueue(RequestQueue):
    """Lowest (priority, arrival time, id) first, wherever a request comes from.

    A heap. Removal only takes a request's entry out of `_live`: what the heap holds beyond that is dead and dropped when it
    surfaces, or all at once when it is most of the heap.
    """

    def __init__(self) -> None:
        self._heap: list[_Entry] = []
        self._live: dict[str, _Entry] = {}
        self._serial = 0

    def add(self, request: Request) -> None:
        self._serial += 1
        entry = (priority_key(request), self._serial, request)
        self._live[request.request_id] = entry
        heapq.heappush(self._heap, entry)

    def prepend(self, request: Request) -> None:
        self.add(request)

    def _is_live(self, entry: _Entry) -> bool:
        return self._live.get(entry[2].request_id) is entry

    def peek(self) -> Request:
        while self._heap and not self._is_live(self._heap[0]):
            heapq.heappop(self._heap)
        if not self._heap:
            raise IndexError("peek at an empty queue")
        return self._heap[0][2]

    def pop(self) -> Request:
        request = self.peek()
        heapq.heappop(self._heap)
        del self._live[request.request_id]
        return request

    def remove(self, request_id: str) -> Request:
        request = self._live.pop(request_id)[2]
        if len(self._heap) > 2 * len(self._live) + 16:
            self._heap = list(self._live.values())
            heapq.heapify(self._heap)
        return request

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._live

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Request]:
        return iter([request for _, _, request in sorted(self._live.values())])


def create_request_queue(policy: SchedulingPolicy) -> RequestQueue:
    """An empty queue. ValueError if the policy is unknown."""
    check_choice("scheduling_policy", policy, SchedulingPolicy)
    return PriorityRequestQueue() if policy == "priority" else FCFSRequestQueue()
