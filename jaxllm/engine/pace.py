"""DecodePace: how many tokens a dispatch may decode so that streams still get theirs in time."""


class DecodePace:
    """Bounds the steps of a dispatch by the measured time of a step.

    Args:
        max_itl: milliseconds between two outputs of a stream.
        max_steps: most steps of a dispatch.
    """

    # A slower step counts at once, a quicker one bit by bit: a stream that is late is worse than one that comes in smaller parts.
    DECAY = 0.8

    def __init__(self, max_itl: float, max_steps: int) -> None:
        self.max_itl, self.max_steps = max_itl, max_steps
        self.step_time: float | None = None
        self._last_end = 0.0

    def observe(self, started: float, ended: float, num_steps: int) -> None:
        """A dispatch of `num_steps` decodes, from its start to when it was read, in seconds. It runs after the last one."""
        seconds = (ended - max(started, self._last_end)) / num_steps
        self._last_end = ended
        if self.step_time is not None:
            seconds = max(seconds, self.DECAY * self.step_time + (1 - self.DECAY) * seconds)
        self.step_time = seconds

    @property
    def num_steps(self) -> int:
        """Most steps of the next dispatch; 1 until a step was measured."""
        if self.step_time is None:
            return 1
        return int(max(1, min(self.max_steps, self.max_itl * 1e-3 // max(self.step_time, 1e-9))))
