"""What a compiled program does, read from its optimized HLO text."""

import math
import re
from dataclasses import dataclass, field
from functools import cached_property

_BITS = {"pred": 8, "token": 0, "opaque": 0}
_ARRAY = re.compile(r"\b(pred|token|opaque|[suf]\d+|bf16|c64|c128|f8\w+|f4\w+)\[([\d,]*)\]")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*?[\]})]) ([a-z][\w\-]*)\((.*)$")
_BRANCHES = re.compile(r"(?:branch_computations=\{([^}]*)\}|(?:true|false)_computation=%?([\w.\-]+))")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition)=%?([\w.\-]+)")
_KINDS = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute", "all-to-all", "collective-broadcast")
_TRANSFERS = ("infeed", "outfeed", "send", "recv")


def shape_bytes(shape: str) -> int:
    """Bytes of the arrays in a shape as HLO writes it, of a tuple's parts together."""
    total = 0
    for dtype, dimensions in _ARRAY.findall(shape):
        bits = _BITS.get(dtype)
        if bits is None:
            bits = int(re.sub(r"^(?:bf|[sufc])(\d+).*", r"\1", dtype))
        total += math.prod(int(size) for size in dimensions.split(",") if size) * bits // 8
    return total


@dataclass(frozen=True)
class _Instruction:
    root: str | None
    name: str
    shape: str
    opcode: str
    rest: str


@dataclass(frozen=True)
class _Place:
    """An instruction where it runs.

    Attributes:
        always: False in a branch of a conditional.
        stored: whether its result goes to memory: inside a fusion, only the root's does.
    """

    instruction: _Instruction
    always: bool
    stored: bool


@dataclass
class _Computation:
    name: str
    instructions: list[_Instruction] = field(default_factory=list)


@dataclass(frozen=True)
class Collective:
    """One communication between devices.

    Attributes:
        kind: all-reduce, all-gather, …
        num_bytes: of its result on one device.
        always: False in a branch of a conditional, which a step may pass by.
        origin: the operation in the source that it was made for, as jax names it.
    """

    kind: str
    num_bytes: int
    always: bool
    origin: str


@dataclass(frozen=True)
class Copy:
    """A copy of an array, or a change of its layout.

    Attributes:
        always: as in Collective.
    """

    shape: str
    num_bytes: int
    always: bool
    origin: str


class Hlo:
    """
    Args:
        text: `jax.stages.Compiled.as_text()`.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self._computations: dict[str, _Computation] = {}
        self._entry = ""
        computation = None
        for line in text.splitlines():
            if line.endswith("{") and not line.startswith((" ", "HloModule")):
                name = re.match(r"(?:ENTRY )?%?([\w.\-]+)", line)
                assert name is not None, line
                computation = _Computation(name.group(1))
                self._computations[computation.name] = computation
                if line.startswith("ENTRY"):
                    self._entry = computation.name
            elif computation is not None and (found := _INSTRUCTION.match(line)):
                computation.instructions.append(_Instruction(*found.groups()))
        if not self._entry:
            raise ValueError("the text has no entry computation")

    @cached_property
    def _places(self) -> list[_Place]:
        """Every instruction that can run."""
        seen: dict[str, tuple[bool, bool]] = {}
        todo = [(self._entry, True, False)]
        while todo:
            name, always, fused = todo.pop()
            if name not in self._computations or (name in seen and seen[name][0] >= always):
                continue
            seen[name] = (always, fused)
            for instruction in self._computations[name].instructions:
                for group, single in _BRANCHES.findall(instruction.rest):
                    todo += [(branch.strip().lstrip("%"), False, False) for branch in (group or single).split(",")]
                is_fusion = instruction.opcode == "fusion"
                todo += [(called, always, is_fusion) for called in _CALLED.findall(instruction.rest)]
        return [
            _Place(instruction, always, not fused or instruction.root is not None)
            for name, (always, fused) in seen.items()
            for instruction in self._computations[name].instructions
        ]

    @cached_property
    def collectives(self) -> list[Collective]:
        """All communication between devices."""
        found = []
        for place in self._places:
            instruction = place.instruction
            kind = instruction.opcode.removesuffix("-start")
            if kind in _KINDS:
                found.append(Collective(kind, shape_bytes(instruction.shape), place.always, _origin(instruction)))
        return found

    def copies(self, min_bytes: int) -> list[Copy]:
        """Copies of at least `min_bytes`, transpositions included."""
        found = []
        for place in self._places:
            instruction = place.instruction
            if place.stored and instruction.opcode in ("copy", "copy-start", "transpose"):
                num_bytes = shape_bytes(instruction.shape)
                if num_bytes >= min_bytes:
                    found.append(Copy(instruction.shape, num_bytes, place.always, _origin(instruction)))
        return found

    @cached_property
    def custom_calls(self) -> dict[str, int]:
        """Target of each custom call, and how many calls of it there are."""
        counts: dict[str, int] = {}
        for place in self._places:
            instruction = place.instruction
            if instruction.opcode == "custom-call":
                target = re.search(r'custom_call_target="([^"]*)"', instruction.rest)
                assert target is not None, instruction
                counts[target.group(1)] = counts.get(target.group(1), 0) + 1
        return counts

    @property
    def host_calls(self) -> list[str]:
        """What needs the host while the program runs: callbacks into Python, and transfers."""
        calls = [target for target in self.custom_calls if "callback" in target.lower() or "python" in target.lower()]
        opcodes = [place.instruction.opcode for place in self._places]
        return calls + [opcode for opcode in opcodes if opcode in _TRANSFERS]


def _origin(instruction: _Instruction) -> str:
    found = re.search(r'op_name="([^"]*)"', instruction.rest)
    return found.group(1) if found else instruction.name
