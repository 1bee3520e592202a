"""In which order the devices of a pipeline exchange what, where each stage has processes of its own.

An exchange holds up both of its stages until both have come to it, and each does what it is given in order. So all must agree on
one order, or they wait for each other for ever; and a bad one makes stages wait that could work. Here it is that of a clock. In
tick t, stage s runs the step that entered at tick t - s; at its end that stage hands on what came of it, and the last hands the
sampled tokens to the first, which needs them as many ticks after the step entered as there are stages:

    three stages     tick 0      tick 1      tick 2      tick 3
    first            step 1      step 2      step 3      step 4, with the tokens of step 1
    second                       step 1      step 2      step 3
    last                                     step 1      step 2

Every process follows the same clock, for all are given the same steps to start and to finish, in the same order. A step that
needs newer tokens than those that will be there enters later, and the stages idle for as many ticks.
"""

from collections import deque

import numpy as np


class Ticks:
    """The clock of one process, and the steps whose tokens have not gone back yet.

    Args:
        num_stages: at least two.

    Attributes:
        next: the earliest tick at which a step may enter.
    """

    def __init__(self, num_stages: int) -> None:
        self._num_stages = num_stages
        self.next = 0
        self._entered: deque[tuple[int, int]] = deque()  # step and its tick

    def enter(self, step: int, needed: int) -> int:
        """A step is started. Returns its tick.

        Args:
            step: its number; they grow.
            needed: the number of the newest step whose tokens it needs; 0 for none.
        """
        tick = max([self.next, *(tick + self._num_stages for earlier, tick in self._entered if earlier <= needed)])
        self.next = tick + 1
        self._entered.append((step, tick))
        return tick

    def finish(self, step: int) -> None:
        """A step is read: the next one enters when its tokens are back, which can be sent now."""
        for entered, tick in self._entered:
            if entered <= step:
                self.next = max(self.next, tick + self._num_stages)

    def due(self, tick: int) -> list[int]:
        """The steps whose tokens go back before `tick` and have not done so yet; each is given once."""
        steps = []
        while self._entered and self._entered[0][1] + self._num_stages <= tick:
            steps.append(self._entered.popleft()[0])
        return steps


class SampledIn:
    """The step in which each request row has sampled last."""

    def __init__(self, num_rows: int) -> None:
        self._steps = np.zeros(num_rows, np.int64)

    def needed(self, fields: dict[str, np.ndarray], num_tokens: int) -> int:
        """The number of the step that sampled the newest token that a batch takes from the devices; 0 if it takes none.

        Args:
            fields: of the batch.
            num_tokens: of its bucket.
        """
        reading = fields["rows"][fields["last_token_index"] < num_tokens]
        return int(self._steps[reading].max(initial=0))

    def note(self, fields: dict[str, np.ndarray], step: int) -> None:
        """The rows that a batch samples do so in this step."""
        rows = fields["sampled_rows"]
        self._steps[rows[rows < len(self._steps)]] = step
