"""EngineProcess: a fresh Python interpreter for an engine core, joined to this one in life and death."""

import contextlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
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

EngineMain = Callable[[socket.socket], None]


class EngineProcess:
    """Starts `main` in a new process. Nothing is forked, and the caller's own script is not run again.

    A pair of sockets joins the two. Either end becomes readable when the other process ends, however it ends, so that nobody has
    to ask whether the other still lives. An engine core sends and gets nothing there after its start. `fileno` is this process's
    end. The new process lets SIGINT and SIGTERM pass.

    Args:
        main: called with the other end; can be pickled, and its modules can be imported.
        name: for lists of processes.
        environment: variables to set beside those of this process.
        pass_fds: file descriptors that the new process has too, under the same numbers.
    """

    def __init__(
        self,
        main: EngineMain,
        name: str = "engine-core",
        environment: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        payload = pickle.dumps(list(sys.path)) + pickle.dumps(main)
        self._link, other_end = socket.socketpair()
        with other_end:
            self._popen = subprocess.Popen(
                [sys.executable, "-c", _BOOT, str(other_end.fileno()), f"jaxllm-{name}"],
                stdin=subprocess.DEVNULL,
                env=None if environment is None else {**os.environ, **environment},
                pass_fds=[other_end.fileno(), *pass_fds],
            )
        # If it has ended already, whoever waits for it will see that.
        with contextlib.suppress(OSError):
            self._link.sendall(payload)

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

    def kill(self) -> None:
        """End it, whatever it does."""
        self._popen.kill()
        self._popen.wait()

    def close(self) -> None:
        """Give up this end; the process must have ended."""
        self._link.close()


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
