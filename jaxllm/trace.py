"""Trace: what an engine does when, as a file that Perfetto and chrome://tracing open. Standard library only.

Every part of an engine (front end, engine core, worker) writes a file of its own into one folder, in whatever process it runs.
Their times are `time.monotonic()`, which all processes of a machine share. `read_trace` puts the files together.
"""

import json
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

# A part of an engine is a track of the picture; the devices are the worker's second one.
TRACKS = ("front end", "engine core", "worker", "device")
FLUSH_EVENTS = 256
MERGED_NAME = "all.json"


class Trace:
    """A trace file that grows. Spans may come from any thread.

    Args:
        folder: is made if it does not exist.
        part: who writes; one of TRACKS.
    """

    def __init__(self, folder: str, part: str) -> None:
        self.part = part
        self._lock = threading.Lock()
        self._num_events = 0
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        for number in range(1 << 20):
            try:
                self._file = (path / f"{part.replace(' ', '_')}-{os.getpid()}-{number}.json").open("x")
                break
            except FileExistsError:
                continue  # an earlier engine of this process
        # The bracket at the end may be missing: a process that is killed leaves a trace too.
        self._file.write("[\n")
        self._write({"name": "process_name", "ph": "M", "args": {"name": f"jaxllm {os.getpid()}"}})
        for track in (part, "device") if part == "worker" else (part,):
            self._write({"name": "thread_name", "ph": "M", "tid": TRACKS.index(track), "args": {"name": track}})

    def span(self, name: str, start: float, end: float, track: str | None = None, **args: Any) -> None:
        """Something that took from `start` to `end`, seconds of `time.monotonic()`, on the writer's own track or another."""
        with self._lock:
            if self._file.closed:
                return
            times = {"ts": round(start * 1e6, 1), "dur": round((end - start) * 1e6, 1)}
            self._write({"name": name, "ph": "X", **times, "tid": TRACKS.index(track or self.part), "args": args})

    def _write(self, event: dict[str, Any]) -> None:
        self._num_events += 1
        comma = "" if self._num_events == 1 else ",\n"
        self._file.write(comma + json.dumps({"pid": os.getpid(), **event}))
        if self._num_events % FLUSH_EVENTS == 0:
            self._file.flush()

    def close(self) -> None:
        """End the file. May be called more than once; spans after it are dropped."""
        with self._lock:
            if not self._file.closed:
                self._file.write("\n]\n")
                self._file.close()


def open_trace(folder: str | None, part: str) -> Trace | None:
    """A trace if there is a folder for it."""
    return None if folder is None else Trace(folder, part)


def read_trace(folder: str | Path) -> list[dict[str, Any]]:
    """All events of a folder, those without a time first, the others by it.

    Raises:
        ValueError: if there are none.
    """
    paths = [path for path in sorted(Path(folder).glob("*.json")) if path.name != MERGED_NAME]
    events = [event for path in paths for event in _events(path)]
    if not events:
        raise ValueError(f"{folder} holds no trace")
    return sorted(events, key=lambda event: event.get("ts", 0.0))


def _events(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text().splitlines():
        text = line.strip().rstrip(",")
        if text in ("", "[", "]"):
            continue
        try:
            yield json.loads(text)
        except json.JSONDecodeError:
            return  # the last line of a process that was killed


def durations(events: Sequence[dict[str, Any]], track: str, name: str) -> list[float]:
    """Seconds of all spans of this name on a track."""
    tid = TRACKS.index(track)
    return [event["dur"] * 1e-6 for event in events if event["ph"] == "X" and (event["tid"], event["name"]) == (tid, name)]
