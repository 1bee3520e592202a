"""Many engines behind load balancers, on one virtual clock.

Engines meet only where a front end looks at them: every 100 ms, when the coordinator publishes how many requests wait and run.
Between two such moments each is simulated by itself, in any of several processes; the results do not depend on how many.
"""

import math
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field

import numpy as np

from jaxllm.bench.sim.engine import EngineSpec, StepTime
from jaxllm.bench.sim.group import GroupResult, LocalGroup, ProcessGroup, no_collections
from jaxllm.bench.sim.workload import Workload
from jaxllm.core.load_balancer import LoadBalancer

# Seconds between two snapshots of the engines' load.
PUBLISH_INTERVAL = 0.1


@dataclass(frozen=True)
class Kill:
    """An engine that dies, at a time in seconds."""

    engine: int
    time: float


@dataclass
class Death:
    """What an engine's death did.

    Attributes:
        failed_over: requests that had not begun to answer and were sent to another engine, if there was one.
        lost: requests that had begun.
    """

    kill: Kill
    failed_over: list[int] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)


@dataclass
class ClusterResult:
    """
    Attributes:
        engine_of: int64 [requests], where each went at last; -1 if nowhere.
        lost: bool [requests].
        groups: the records of all engines.
    """

    engine_of: np.ndarray
    lost: np.ndarray
    deaths: list[Death]
    groups: list[GroupResult]


def simulate(
    workload: Workload,
    spec: EngineSpec,
    step_time: StepTime,
    *,
    num_engines: int = 1,
    num_front_ends: int = 1,
    request_time: float = 0.0,
    kills: Sequence[Kill] = (),
    restart_after: float | None = None,
    num_processes: int = 0,
    fast: bool = True,
) -> ClusterResult:
    """Run a workload to its end.

    Args:
        num_front_ends: they take requests in turn, each with a load balancer that knows its own requests only.
        request_time: seconds from a request's arrival until it reaches its engine.
        restart_after: seconds after which an engine that died takes requests again, with an empty cache; None for never.
        num_processes: to share the engines; 0 for none but this one.
        fast: see SimEngine.

    Raises:
        ValueError: if a request does not fit in the model's context, or a kill names no engine or an impossible time.
    """
    longest = int((workload.prompt_lens + workload.output_lens).max())
    if longest > spec.scheduler.max_model_len:
        raise ValueError(f"a request of {longest} tokens does not fit in --max-model-len {spec.scheduler.max_model_len}")
    for kill in kills:
        if not 0 <= kill.engine < num_engines or not 0 <= kill.time < math.inf:
            raise ValueError(
                f"--kill takes ENGINE@SECONDS with an engine below {num_engines} and a time of at least 0, "
                f"got {kill.engine}@{kill.time}"
            )
    num_groups = max(1, min(num_processes, num_engines))
    members = [list(range(first, num_engines, num_groups)) for first in range(num_groups)]
    with ExitStack() as stack:
        stack.enter_context(no_collections())
        make = ProcessGroup if num_processes > 0 else LocalGroup
        groups = [
            stack.enter_context(closing(make(own, spec, step_time, workload, request_time, num_front_ends, fast)))
            for own in members
        ]
        cluster = _Cluster(workload, groups, members, num_engines, num_front_ends)
        cluster.run(kills, restart_after)
        return cluster.finish()


class _Cluster:
    """The front ends, and what they know of the engines."""

    def __init__(
        self,
        workload: Workload,
        groups: Sequence[ProcessGroup | LocalGroup],
        members: Sequence[Sequence[int]],
        num_engines: int,
        num_front_ends: int,
    ) -> None:
        self.groups, self.members = groups, members
        self.balancers = [LoadBalancer(num_engines, index, num_front_ends) for index in range(num_front_ends)]
        self.times = workload.times
        self.engine_of = np.full(len(workload), -1)
        self.lost = np.zeros(len(workload), bool)
        self.deaths: list[Death] = []
        # Waiting and running requests of each engine, at the last snapshot and now.
        self.published = np.zeros((2, num_engines), np.int64)
        self.latest = np.zeros((2, num_engines), np.int64)
        self.num_assigned = 0
        self.orphans: list[int] = []

    def run(self, kills: Sequence[Kill], restart_after: float | None) -> None:
        events = [(kill.time, False, kill) for kill in kills]
        if restart_after is not None:
            events += [(kill.time + restart_after, True, kill) for kill in kills]
        events.sort(key=lambda event: event[:2])
        now, num_ticks = 0.0, 0
        while self.num_assigned < len(self.times) or self.orphans or events:
            # Snapshots matter as long as there is something to choose.
            choosing = len(self.published[0]) > 1 and self.num_assigned < len(self.times)
            tick = (num_ticks + 1) * PUBLISH_INTERVAL if choosing else math.inf
            until = min(tick, events[0][0] if events else math.inf)
            self.advance(now, until)
            now = until
            if now == tick:
                num_ticks += 1
                self.publish()
            while events and events[0][0] <= now:
                _, is_restart, kill = events.pop(0)
                (self.restart if is_restart else self.kill)(kill)
        self.advance(now, math.inf)

    def advance(self, now: float, until: float) -> None:
        """Send what arrives before `until` to engines, and let all of them run until then."""
        stop = int(np.searchsorted(self.times, until))
        requests = [*self.orphans, *range(self.num_assigned, stop)]
        self.orphans, self.num_assigned = [], stop
        engines = []
        for request in requests:
            try:
                engines.append(self.balancers[request % len(self.balancers)].pick())
            except LookupError:
                engines.append(-1)
        self.engine_of[requests] = engines
        self.lost[[request for request, engine in zip(requests, engines, strict=True) if engine < 0]] = True
        shares: list[tuple[list[int], list[int]]] = [([], []) for _ in self.groups]
        for engine, request in zip(engines, requests, strict=True):
            if engine >= 0:
                share = shares[engine % len(self.groups)]
                share[0].append(engine)
                share[1].append(request)
        for group, (to, what) in zip(self.groups, shares, strict=True):
            group.send("advance", until, to, what, now)
        for group, own in zip(self.groups, self.members, strict=True):
            counts = group.receive()
            self.latest[:, own] = counts[:2]
            for balancer, ended in zip(self.balancers, counts[2:], strict=True):
                for column in np.flatnonzero(ended).tolist():
                    balancer.finish(own[column], int(ended[column]))

    def publish(self) -> None:
        """Tell every front end the load of all engines, if it has changed."""
        if np.array_equal(self.latest, self.published):
            return
        self.published[:] = self.latest
        counts = self.latest.T.tolist()
        for balancer in self.balancers:
            balancer.update_all(counts)

    def kill(self, kill: Kill) -> None:
        if kill.engine not in self.balancers[0].available:
            return
        group = self.groups[kill.engine % len(self.groups)]
        group.send("kill", kill.engine)
        not_begun, begun = group.receive()
        for request in (*not_begun, *begun):
            self.balancers[request % len(self.balancers)].finish(kill.engine)
        for balancer in self.balancers:
            balancer.set_available(kill.engine, False)
        self.latest[:, kill.engine] = 0
        self.lost[begun] = True
        self.engine_of[not_begun] = -1
        self.orphans += not_begun
        self.deaths.append(Death(kill, not_begun, begun))

    def restart(self, kill: Kill) -> None:
        if kill.engine in self.balancers[0].available:
            return
        group = self.groups[kill.engine % len(self.groups)]
        group.send("restart", kill.engine, kill.time)
        group.receive()
        for balancer in self.balancers:
            balancer.set_available(kill.engine, True)

    def finish(self) -> ClusterResult:
        for group in self.groups:
            group.send("finish")
        return ClusterResult(self.engine_of, self.lost, self.deaths, [group.receive() for group in self.groups])
