"""How a program is launched, read from XLA's own listing of its thunks.

A command buffer is a CUDA graph: what is inside it costs the host one launch. A loop or a conditional outside of one makes the
host wait for the device, to learn how it goes on.
"""

import re
from dataclasses import dataclass
from functools import cached_property

_THUNK = re.compile(r"^(\s*)\d+: (k\w+)")


@dataclass(frozen=True)
class Thunks:
    """
    Args:
        text: the listing after all passes.
    """

    text: str

    @cached_property
    def _found(self) -> list[tuple[int, str]]:
        return [(len(found.group(1)), found.group(2)) for line in self.text.splitlines() if (found := _THUNK.match(line))]

    @property
    def kinds(self) -> list[str]:
        """The outermost thunks in order: one launch each, or more."""
        return [kind for indent, kind in self._found if indent == 0]

    @property
    def num_kernels(self) -> int:
        """Kernels in the listing, those in branches included."""
        return sum(kind in ("kKernel", "kCustomKernel", "kCustomCall", "kGemm", "kCublasLtMatmul") for _, kind in self._found)

    @property
    def waits_for_device(self) -> bool:
        """Whether the host must wait for the device in the middle of the program."""
        return any(kind in ("kWhile", "kConditional") for kind in self.kinds)
