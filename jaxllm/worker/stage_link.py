"""StageLink: the way from one stage of a pipeline to another, for stages that are in different processes."""

import logging
import queue
import threading

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxllm.worker.program_cache import ProgramCache
from sharding.rules import sharding_of

logger = logging.getLogger(__name__)

_Kind = tuple[tuple[int, ...], str]  # shape and dtype


class StageLink:
    """Moves arrays that are the same on all devices of a stage to all devices of another, each from its counterpart.

    A program over the devices of both does so: every process of both must start it, `send` in one and `receive` in the other,
    in the same order as all else that the two exchange. In that order they run, also on a CPU, which starts whatever has its
    arguments: each takes what the one before it has counted.

    XLA:CPU runs so small a program of one device a process in the thread that starts it, which would wait there until the other
    side has come, and the other side may come only after an answer of this process. So there a thread of its own sends. On a GPU,
    and with several CPU devices a process, programs are only put into a queue, whose order other threads must not disturb.

    Args:
        source, target: their meshes, of the same size and with no process in common.
    """

    def __init__(self, source: Mesh, target: Mesh) -> None:
        devices = np.stack([source.devices.reshape(-1), target.devices.reshape(-1)])
        self.mesh = Mesh(devices, ("stage", "device"), axis_types=(AxisType.Auto,) * 2)
        self._sharding = NamedSharding(self.mesh, PartitionSpec("stage"))
        self._target = sharding_of(target, ())
        self._is_source = bool(source.local_devices)
        self._local_devices = self.mesh.local_devices
        assert self._is_source != bool(target.local_devices)
        self._programs: dict[_Kind, jax.stages.Compiled] = {}
        self._count: jax.Array | None = None
        # What this side puts in where it gets something out.
        self._nothing: dict[_Kind, jax.Array] = {}
        self._sends: queue.SimpleQueue[tuple[_Kind, jax.Array] | None] | None = None
        self._failure: Exception | None = None
        self._needs_thread = [device.platform for device in self._local_devices] == ["cpu"]

    def compile(self, shape: tuple[int, ...], dtype: str, programs: ProgramCache) -> None:
        """What must be done once before arrays of this kind can be moved; `programs` is that of `mesh`."""
        kind = (shape, dtype)
        if kind in self._programs:
            return
        name = f"move {'x'.join(map(str, shape))} {dtype}"
        self._programs[kind] = programs.get(name, kind, lambda name: self._lower(*kind, name))
        if self._count is None:
            self._count = self._join([jnp.zeros(1, jnp.int32, device=device) for device in self._local_devices])
        if not self._is_source:
            self._nothing[kind] = self._join([jnp.zeros(shape, dtype, device=device) for device in self._local_devices])

    def _lower(self, shape: tuple[int, ...], dtype: str, name: str) -> jax.stages.Lowered:
        def move(pair: jax.Array, count: jax.Array) -> tuple[jax.Array, jax.Array]:
            return lax.ppermute(pair, "stage", [(0, 1)]), count + 1

        spec = PartitionSpec("stage")
        function = jax.shard_map(move, mesh=self.mesh, in_specs=spec, out_specs=spec)
        function.__name__ = name
        both = jax.ShapeDtypeStruct((2 * shape[0], *shape[1:]), dtype, sharding=self._sharding)
        count = jax.ShapeDtypeStruct((2,), jnp.int32, sharding=self._sharding)
        return jax.jit(function, out_shardings=self._sharding).lower(both, count)

    def _join(self, pieces: list[jax.Array]) -> jax.Array:
        """Both stages' arrays as one, of which each has a half."""
        length, *rest = pieces[0].shape
        return jax.make_array_from_single_device_arrays((2 * length, *rest), self._sharding, pieces)

    def send(self, array: jax.Array) -> None:
        """In the processes of the source. Raises what an earlier one has raised where a thread sends."""
        if self._failure is not None:
            raise self._failure
        pieces = [shard.data for shard in array.addressable_shards]
        kind, both = (array.shape, array.dtype.name), self._join(pieces)
        if not self._needs_thread:
            self._move(kind, both)
            return
        if self._sends is None:
            self._sends = queue.SimpleQueue()
            # A daemon: where the other side has gone, it waits for ever.
            threading.Thread(target=self._send_all, args=(self._sends,), daemon=True, name="stage-link").start()
        self._sends.put((kind, both))

    def _send_all(self, sends: queue.SimpleQueue[tuple[_Kind, jax.Array] | None]) -> None:
        while (send := sends.get()) is not None:
            try:
                self._move(*send)
            except Exception as error:
                logger.exception("what a stage has computed cannot be sent to the next")
                self._failure = error
                return
            del send

    def close(self) -> None:
        """Send nothing more."""
        if self._sends is not None:
            self._sends.put(None)

    def receive(self, shape: tuple[int, ...], dtype: str) -> jax.Array:
        """In the processes of the target; what it gives need not be there yet."""
        both = self._move((shape, dtype), self._nothing[shape, dtype])
        pieces = [shard.data for shard in both.addressable_shards]
        return jax.make_array_from_single_device_arrays(shape, self._target, pieces)

    def _move(self, kind: _Kind, both: jax.Array) -> jax.Array:
        moved, self._count = self._programs[kind](both, self._count)
        return moved
