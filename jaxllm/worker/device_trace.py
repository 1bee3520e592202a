"""DeviceTrace: when the devices were busy, and when they waited for the host although there was work."""

import queue
import threading
import time

import jax

from jaxllm.trace import Trace


class DeviceTrace:
    """Waits for the end of every step in a thread of its own, since the stepping thread looks only when it has time.

    A step's span on the "device" track starts when it was dispatched or when the step before it ended, whichever is later. From
    the end of a step to a later dispatch of the next is an "idle" span, unless the engine had nothing to do between them.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._steps: queue.SimpleQueue[tuple[int, float, jax.Array, bool, str] | None] = queue.SimpleQueue()
        self._num_steps = 0
        self._had_nothing_to_do = True
        self._last_end = 0.0
        self._thread = threading.Thread(target=self._watch, daemon=True, name="device-trace")
        self._thread.start()

    def add(self, start: float, end: float, result: jax.Array | None, bucket: str) -> None:
        """Note a step that was dispatched between `start` and `end`, seconds of `time.monotonic()`.

        Args:
            result: any array that the step makes; None for a step without tokens.
        """
        if result is None:
            self._had_nothing_to_do = True
            return
        self._trace.span("dispatch", start, end, step=self._num_steps, bucket=bucket)
        self._steps.put((self._num_steps, end, result, self._had_nothing_to_do, bucket))
        self._had_nothing_to_do = False
        self._num_steps += 1

    def _watch(self) -> None:
        while (item := self._steps.get()) is not None:
            step, dispatched, result, after_nothing, bucket = item
            result.block_until_ready()
            end = time.monotonic()
            if not after_nothing and dispatched > self._last_end:
                self._trace.span("idle", self._last_end, dispatched, "device", before_step=step)
            self._trace.span("step", max(dispatched, self._last_end), end, "device", step=step, bucket=bucket)
            self._last_end = end

    def close(self) -> None:
        """Wait for the last step, and end the file."""
        self._steps.put(None)
        self._thread.join()
        self._trace.close()
