"""ChildProcess: a fresh Python interpreter, joined to this one in life and death."""

import contextlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence

# Ctrl-C and a service manager's SIGTERM reach every process of the group. What they mean is for the front end to decide: it may
# want its requests to run to their end first, and if it dies of them, so does this process. SIGTERM is not set to SIG_IGN, which
# processes started from there would inherit.
# The path comes before the function: without it the function's module may not be found.
_BOOT = """
import pickle, signal, socket, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, lambda number, frame: None)
link = socket.socket(fileno=int(sys.argv[1]))
link.set_inheritable(False)
file = link.makefile("rb")
sys.path[:] = pickle.load(file)
pickle.load(file)(link)
"""

ChildMain = Callable[[socket.socket], None]

_MOST_LAST_WORDS = 8192
_LAST_LINES = 6


class ChildProcess:
    """Starts `main` in a new process. Nothing is forked, and the caller's own script is not run again.

    A pair of sockets joins the two. Either end becomes readable when the other process ends, however it ends, so that nobody has
    to ask whether the other still lives. `fileno` is this process's end. The new process lets SIGINT and SIGTERM pass.

    Args:
        main: called with the other end; can be pickled, and its modules can be imported.
        name: for lists of processes.
        environment: variables to set beside those of this process.
        fds: file descriptors that it inherits, under the same numbers.
        keep_last_words: remember what it wrote to its standard error last, which goes to that of this process.
    """

    def __init__(
        self,
        main: ChildMain,
        name: str,
        environment: Mapping[str, str] | None = None,
        fds: Sequence[int] = (),
        keep_last_words: bool = False,
    ) -> None:
        payload = pickle.dumps(list(sys.path)) + pickle.dumps(main)
        self._link, other_end = socket.socketpair()
        with other_end:
            self._popen = subprocess.Popen(
                [sys.executable, "-c", _BOOT, str(other_end.fileno()), f"jaxllm-{name}"],
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE if keep_last_words else None,
                env=None if environment is None else {**os.environ, **environment},
                pass_fds=[other_end.fileno(), *fds],
            )
        self._last_words = bytearray()
        self._listener = threading.Thread(target=self._listen, daemon=True, name=f"{name}-stderr") if keep_last_words else None
        if self._listener is not None:
            self._listener.start()
        # If it has ended already, whoever waits for it will see that.
        with contextlib.suppress(OSError):
            self._link.sendall(payload)

    def _listen(self) -> None:
        assert self._popen.stderr is not None
        while data := os.read(self._popen.stderr.fileno(), 65536):
            self._last_words += data
            del self._last_words[:-_MOST_LAST_WORDS]
            with contextlib.suppress(OSError):  # nobody reads this process's own standard error
                os.write(2, data)
        self._popen.stderr.close()

    @property
    def pid(self) -> int:
        return self._popen.pid

    def fileno(self) -> int:
        """Becomes readable when the process has ended."""
        return self._link.fileno()

    def tell(self, data: bytes) -> None:
        """Send to `main`'s end; a process that has ended gets nothing."""
        with contextlib.suppress(OSError):
            self._link.sendall(data)

    def hear(self) -> bytes:
        """What `main` has sent, waiting for it; nothing once it has ended."""
        try:
            return self._link.recv(64)
        except OSError:
            return b""

    def has_ended(self) -> bool:
        return self._popen.poll() is not None

    def wait(self, timeout: float | None) -> bool:
        """Wait at most `timeout` seconds for the end, or for ever. Returns whether it came."""
        try:
            self._popen.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        return True

    def how_it_ended(self) -> str:
        """For people; waits for the end, which `fileno` has announced."""
        if not self.wait(5.0):
            return "closed its side"
        code = self._popen.returncode
        if code >= 0:
            return f"ended with exit code {code}"
        try:
            return f"was killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"was killed by signal {-code}"

    def last_words(self) -> str:
        """The last lines of its standard error, as one line; "" if it wrote nothing, or nobody asked for them to be kept."""
        if self._listener is not None and self.has_ended():
            self._listener.join(1.0)  # what it wrote may still be on its way
        text = bytes(self._last_words).decode(errors="replace").replace("\r", "\n")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return " | ".join(lines[-_LAST_LINES:])

    def kill(self) -> None:
        """End it, whatever it does."""
        self._popen.kill()
        self._popen.wait()

    def close(self) -> None:
        """Give up this end; the process must have ended."""
        self._link.close()
        if self._listener is not None:
            self._listener.join(1.0)


def wait_for_parent(link: socket.socket, parent_pid: int) -> None:
    """In the new process: return when the other one has ended."""
    ends = select.poll()
    ends.register(link, select.POLLIN)
    # A process forked from the parent would hold the parent's end open beyond its death.
    try:
        parent = os.pidfd_open(parent_pid)
    except (AttributeError, OSError):
        parent = None  # no such call on this system
    if parent is not None:
        ends.register(parent, select.POLLIN)
    if os.getppid() == parent_pid:
        ends.poll()
