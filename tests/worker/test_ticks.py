"""The order in which the stages of a pipeline exchange what they compute: nobody waits for ever, nor for nothing."""

from collections import deque
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.worker.ticks import SampledIn, Ticks

# Done by one stage: ("run", step), or by two at once: ("hand on", step, from stage), ("back", step).
Action = tuple[str | int, ...]


def actions_of(stage: int, num_stages: int, commands: list[tuple[str, int, int]]) -> Iterator[Action]:
    """What StageRunner does in a process of a stage."""
    ticks = Ticks(num_stages)
    is_first, is_last = stage == 0, stage == num_stages - 1

    def back(tick: int) -> Iterator[Action]:
        for step in ticks.due(tick):
            if is_first or is_last:
                yield "back", step

    for command, step, needed in commands:
        if command == "finish":
            ticks.finish(step)
            yield from back(ticks.next)
            continue
        tick = ticks.enter(step, needed)
        if is_last:
            yield from back(tick + stage - 1)
            yield "hand on", step, stage - 1
            yield from back(tick + stage)
        elif is_first:
            yield from back(tick)
        else:
            yield "hand on", step, stage - 1
        yield "run", step
        if not is_last:
            yield "hand on", step, stage
            yield from back(tick + 1)


def run(num_stages: int, commands: list[tuple[str, int, int]]) -> dict[tuple[int, int], int]:
    """Stages that do all in the order given, in rounds of one "run" each. Returns the round in which each (stage, step) has run.

    Fails if they wait for each other.
    """
    todo = [deque(actions_of(stage, num_stages, commands)) for stage in range(num_stages)]
    rounds: dict[tuple[int, int], int] = {}
    came_back = {0}
    needed = {step: need for command, step, need in commands if command == "start"}
    number = 0
    while any(todo):
        moved = False
        for stage, actions in enumerate(todo):
            if actions and actions[0][0] == "run":
                step = actions.popleft()[1]
                assert isinstance(step, int)
                assert stage > 0 or max(came_back) >= needed[step]
                rounds[stage, step] = number
                moved = True
        while exchange := next((actions[0] for actions in todo if actions and _can_start(actions[0], todo)), None):
            for stage in _parties(exchange, num_stages):
                assert todo[stage].popleft() == exchange
            if exchange[0] == "back":
                assert isinstance(exchange[1], int)
                assert rounds[num_stages - 1, exchange[1]] <= number
                came_back.add(exchange[1])
            moved = True
        assert moved, f"all wait: {[actions[0] if actions else None for actions in todo]}"
        number += 1
    return rounds


def _parties(action: Action, num_stages: int) -> tuple[int, int]:
    if action[0] == "back":
        return num_stages - 1, 0
    assert isinstance(action[2], int)
    return action[2], action[2] + 1


def _can_start(action: Action, todo: list[deque[Action]]) -> bool:
    if action[0] == "run":
        return False
    return all(todo[stage] and todo[stage][0] == action for stage in _parties(action, len(todo)))


@pytest.mark.parametrize("num_stages", [2, 3, 5])
def test_no_stage_idles_while_enough_steps_are_in_flight(num_stages):
    num_steps = 20
    commands = []
    for step in range(1, num_steps + num_stages + 1):
        if step <= num_steps:
            commands.append(("start", step, max(0, step - num_stages)))
        if step > num_stages:
            commands.append(("finish", step - num_stages, 0))
    rounds = run(num_stages, commands)
    assert rounds == {(stage, step): step - 1 + stage for stage in range(num_stages) for step in range(1, num_steps + 1)}


@pytest.mark.parametrize("num_stages", [2, 3])
def test_one_request_goes_through_stage_by_stage(num_stages):
    """Each step needs the tokens of the one before it."""
    commands = [command for step in range(1, 6) for command in (("start", step, step - 1), ("finish", step, 0))]
    rounds = run(num_stages, commands)
    assert [rounds[0, step] for step in range(1, 6)] == [num_stages * step for step in range(5)]


@st.composite
def schedules(draw: st.DrawFn) -> tuple[int, list[tuple[str, int, int]]]:
    """Steps are started and finished in order, a finished one at any time after its start; any earlier tokens may be needed."""
    num_stages = draw(st.integers(2, 5))
    commands, started, finished = [], 0, 0
    for is_start in draw(st.lists(st.booleans(), max_size=30)):
        if is_start:
            started += 1
            commands.append(("start", started, draw(st.integers(0, started - 1))))
        elif finished < started:
            finished = draw(st.integers(finished + 1, started))
            commands.append(("finish", finished, 0))
    return num_stages, [*commands, ("finish", started, 0)]


@given(schedules())
def test_nobody_waits_for_ever(schedule):
    """Whatever is started and finished when: each step runs on every stage, and has the tokens that it needs."""
    num_stages, commands = schedule
    num_steps = sum(command == "start" for command, _, _ in commands)
    assert len(run(num_stages, commands)) == num_stages * num_steps


def test_the_newest_token_that_a_batch_reads():
    sampled_in = SampledIn(4)
    # Two rows of a bucket of 8 tokens and 3 rows sample; the third row of the batch is padding.
    sampled_in.note({"sampled_rows": np.array([2, 0, 4])}, 5)
    sampled_in.note({"sampled_rows": np.array([3, 4, 4])}, 6)
    reading = {"rows": np.array([0, 3, 4]), "last_token_index": np.array([0, 8, 8])}
    assert sampled_in.needed(reading, 8) == 5
    assert sampled_in.needed({**reading, "last_token_index": np.array([0, 1, 8])}, 8) == 6
    assert sampled_in.needed({**reading, "last_token_index": np.array([8, 8, 8])}, 8) == 0
