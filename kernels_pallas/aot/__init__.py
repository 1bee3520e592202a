"""Programs for a GPU that is not here: compiled by XLA for a description of the device, and looked into.

What is compiled is what the device would run, but for two things that need the device itself: the search for the quickest matrix
products (XLA takes its own cost model's choice) and cuDNN's plans.

    mesh = Mesh(numpy.asarray(devices(TARGETS["h200"], 4)), ("tensor",))
    arguments = [jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec)), ...]
    with lowering_on(mesh):
        lowered = jax.jit(function).lower(*arguments)
    program = compile_for_device(lowered)
    program.hlo.collectives, program.thunks.kinds, program.compiled.memory_analysis()

Needs jax's CUDA plugin and NVIDIA's compiler, but neither a GPU nor the rest of CUDA: the extra `aot`.
"""

from kernels_pallas.aot.compile import (
    Program,
    compile_for_device,
    devices,
    lowering_on,
    unavailable_reason,
    without_persistent_cache,
)
from kernels_pallas.aot.hlo import Collective, Copy, Hlo
from kernels_pallas.aot.kernels import KernelResources
from kernels_pallas.aot.targets import TARGETS, Target
from kernels_pallas.aot.thunks import Thunks

__all__ = [
    "TARGETS",
    "Collective",
    "Copy",
    "Hlo",
    "KernelResources",
    "Program",
    "Target",
    "Thunks",
    "compile_for_device",
    "devices",
    "lowering_on",
    "unavailable_reason",
    "without_persistent_cache",
]
