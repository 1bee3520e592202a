"""Functions in LLVM's language, written from Python: numbers and vectors with operators, loops, loads and stores.

A type is LLVM's name of it: "i64", "float", "ptr", "<16 x float>". Integers are signed.
"""

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

# 32-bit numbers of a vector register.
LANES = 16
_BITS = {"i1": 1, "i8": 8, "i16": 16, "i32": 32, "i64": 64, "bfloat": 16, "float": 32, "ptr": 64}
_INTEGER = {"<": "slt", "<=": "sle", ">": "sgt", ">=": "sge", "==": "eq", "!=": "ne"}
_REAL = {"<": "olt", "<=": "ole", ">": "ogt", ">=": "oge", "==": "oeq", "!=": "une"}


def vector(element: str, lanes: int = LANES) -> str:
    """The type of a vector."""
    return f"<{lanes} x {element}>"


FLOATS, INTS, SHORTS, PAIRS = vector("float"), vector("i32"), vector("i16"), vector("bfloat", 2 * LANES)


def element_of(type_: str) -> str:
    """Of a vector's type; a number's is its own."""
    return type_.split(" x ")[1][:-1] if type_.startswith("<") else type_


def lanes_of(type_: str) -> int:
    """1 for a number."""
    return int(type_[1:].split(" x ")[0]) if type_.startswith("<") else 1


def bytes_of(type_: str) -> int:
    """Of one element."""
    return _BITS[element_of(type_)] // 8


def _literal(value: float, element: str) -> str:
    if element != "float":
        return str(int(value))
    # LLVM wants a float's bits as those of the double of the same value.
    (single,) = struct.unpack("f", struct.pack("f", value))
    return "0x" + struct.pack(">d", single).hex().upper()


class Value:
    """A number, vector or pointer of a function that is being written. Operators take Python numbers for constants."""

    def __init__(self, function: "Function", type_: str, name: str) -> None:
        self.function, self.type, self.name = function, type_, name

    def __str__(self) -> str:
        return f"{self.type} {self.name}"

    def _binary(self, integer: str | None, real: str | None, left: "Value | float", right: "Value | float") -> "Value":
        left, right = self.function.constant(left, self.type), self.function.constant(right, self.type)
        assert left.type == right.type, f"{left.type} and {right.type}"
        operation = real if element_of(self.type) == "float" else integer
        assert operation is not None, f"no such operation on {self.type}"
        return self.function.emit(f"{operation} {self.type} {left.name}, {right.name}", self.type)

    def __add__(self, other: "Value | float") -> "Value":
        return self._binary("add", "fadd", self, other)

    def __sub__(self, other: "Value | float") -> "Value":
        return self._binary("sub", "fsub", self, other)

    def __rsub__(self, other: float) -> "Value":
        return self._binary("sub", "fsub", other, self)

    def __mul__(self, other: "Value | float") -> "Value":
        return self._binary("mul", "fmul", self, other)

    __radd__, __rmul__ = __add__, __mul__

    def __truediv__(self, other: "Value | float") -> "Value":
        return self._binary(None, "fdiv", self, other)

    def __floordiv__(self, other: "Value | int") -> "Value":
        """Rounds towards zero."""
        return self._binary("sdiv", None, self, other)

    def __mod__(self, other: "Value | int") -> "Value":
        return self._binary("srem", None, self, other)

    def __and__(self, other: "Value | int") -> "Value":
        return self._binary("and", None, self, other)

    def __lshift__(self, other: "Value | int") -> "Value":
        return self._binary("shl", None, self, other)

    def __rshift__(self, other: "Value | int") -> "Value":
        """Fills with zeros."""
        return self._binary("lshr", None, self, other)

    def _compare(self, how: str, other: "Value | float") -> "Value":
        other = self.function.constant(other, self.type)
        assert self.type == other.type, f"{self.type} and {other.type}"
        operation = f"fcmp {_REAL[how]}" if element_of(self.type) == "float" else f"icmp {_INTEGER[how]}"
        lanes = lanes_of(self.type)
        type_ = vector("i1", lanes) if lanes > 1 else "i1"
        return self.function.emit(f"{operation} {self.type} {self.name}, {other.name}", type_)

    def __lt__(self, other: "Value | float") -> "Value":
        return self._compare("<", other)

    def __gt__(self, other: "Value | float") -> "Value":
        return self._compare(">", other)

    def __ge__(self, other: "Value | float") -> "Value":
        return self._compare(">=", other)

    def equals(self, other: "Value | float") -> "Value":
        return self._compare("==", other)

    def at(self, index: "Value | int", element: str) -> "Value":
        """This pointer, moved by `index` elements."""
        return self.function.emit(f"getelementptr {element}, ptr {self.name}, {self.function.constant(index)}", "ptr")

    def field(self, offset: int, type_: str) -> "Value":
        """What lies `offset` bytes behind this pointer."""
        return self.function.load(self.at(offset, "i8"), type_)

    def cast(self, type_: str, how: str = "bitcast") -> "Value":
        """The same bits as another type, or what LLVM's `how` makes of them."""
        return self.function.emit(f"{how} {self} to {type_}", type_)

    def widened(self) -> "Value":
        """An i32 as an i64."""
        return self.cast("i64", "sext")

    def narrowed(self) -> "Value":
        """An i64 as an i32."""
        return self.cast("i32", "trunc")


class Module:
    """Functions that are compiled together."""

    def __init__(self) -> None:
        self.functions: list[Function] = []
        self.declarations: dict[str, str] = {}

    def __str__(self) -> str:
        return "\n".join([*self.declarations.values(), *map(str, self.functions)])


class Function:
    """A function of a module, written from its first line to its last.

    Args:
        arguments: their types.
        public: it can be called from outside of the module.
    """

    def __init__(
        self, module: Module, name: str, arguments: Sequence[str], *, returns: str = "void", public: bool = False
    ) -> None:
        self.module, self.name, self.returns, self._public = module, name, returns, public
        self.arguments = [Value(self, type_, f"%a{index}") for index, type_ in enumerate(arguments)]
        self._variables: list[str] = []
        self._lines: list[str] = []
        self._count = 0
        module.functions.append(self)

    def __str__(self) -> str:
        arguments = ", ".join(map(str, self.arguments))
        head = f"define {'' if self._public else 'internal '}{self.returns} @{self.name}({arguments}) {{"
        return "\n".join([head, "entry:", *self._variables, "br label %start", "start:", *self._lines, "}"])

    def _next(self) -> int:
        self._count += 1
        return self._count

    def emit(self, text: str, type_: str) -> Value:
        """An instruction with a result."""
        value = Value(self, type_, f"%v{self._next()}")
        self._lines.append(f"{value.name} = {text}")
        return value

    def constant(self, value: Value | float, type_: str = "i64") -> Value:
        """A constant, in all lanes of a vector; a Value as it is."""
        if isinstance(value, Value):
            return value
        element, lanes = element_of(type_), lanes_of(type_)
        return self.constants([value] * lanes, element) if lanes > 1 else Value(self, type_, _literal(value, element))

    def constants(self, values: Sequence[float], element: str) -> Value:
        """A vector of constants."""
        literal = "<" + ", ".join(f"{element} {_literal(value, element)}" for value in values) + ">"
        return Value(self, vector(element, len(values)), literal)

    @property
    def null(self) -> Value:
        return Value(self, "ptr", "null")

    def address_of(self, function: "Function") -> Value:
        return Value(self, "ptr", f"@{function.name}")

    def variable(self, initial: Value | int) -> "Variable":
        """A value that changes, an i64 if it starts with a number."""
        initial = self.constant(initial)
        pointer = Value(self, "ptr", f"%p{self._next()}")
        self._variables.append(f"{pointer.name} = alloca {initial.type}")
        variable = Variable(initial.type, pointer)
        variable.set(initial)
        return variable

    def array(self, element: str, size: int) -> Value:
        """Memory on the stack, aligned to a cache line."""
        pointer = Value(self, "ptr", f"%p{self._next()}")
        self._variables.append(f"{pointer.name} = alloca [{size} x {element}], align 64")
        return pointer

    def load(self, pointer: Value, type_: str) -> Value:
        return self.emit(f"load {type_}, ptr {pointer.name}, align {bytes_of(type_)}", type_)

    def store(self, value: Value, pointer: Value) -> None:
        self._lines.append(f"store {value}, ptr {pointer.name}, align {bytes_of(value.type)}")

    def store_lanes(self, value: Value, pointer: Value, mask: Value) -> None:
        """Store the lanes of a vector for which `mask` is set."""
        width = 8 * bytes_of(value.type)
        name = f"llvm.masked.store.v{LANES}{'f' if element_of(value.type) == 'float' else 'i'}{width}.p0"
        self.call(name, [value, pointer, self.constant(width // 8, "i32"), mask])

    def store_fields(self, pointer: Value, values: Sequence[Value]) -> None:
        """Store numbers of 8 bytes one after another."""
        for index, value in enumerate(values):
            assert bytes_of(value.type) == 8
            self.store(value, pointer.at(8 * index, "i8"))

    def splat(self, value: Value) -> Value:
        """A number in all lanes."""
        type_ = vector(value.type)
        first = self.emit(f"insertelement {type_} poison, {value}, i64 0", type_)
        return self.emit(f"shufflevector {first}, {type_} poison, <{LANES} x i32> zeroinitializer", type_)

    def first_lane(self, value: Value) -> Value:
        """A number in the first lane, zeros in the others."""
        zeros = self.constant(0, vector(value.type))
        return self.emit(f"insertelement {zeros}, {value}, i64 0", zeros.type)

    def shuffle(self, left: Value, right: Value, lanes: Sequence[int]) -> Value:
        """Lanes of two vectors, those of the second counted from the first's end."""
        mask = ", ".join(f"i32 {lane}" for lane in lanes)
        return self.emit(f"shufflevector {left}, {right}, <{len(lanes)} x i32> <{mask}>", left.type)

    def select(self, condition: Value, yes: Value, no: Value | float) -> Value:
        return self.emit(f"select {condition}, {yes}, {self.constant(no, yes.type)}", yes.type)

    def both(self, left: Value, right: Value) -> Value:
        """Of two conditions."""
        return self.emit(f"and {left}, {right.name}", left.type)

    def minimum(self, left: Value, right: Value | float) -> Value:
        return self.select(left < right, left, right)

    def maximum(self, left: Value, right: Value | float) -> Value:
        return self.select(left > right, left, right)

    def call(self, callee: "str | Function | Value", arguments: Sequence[Value], returns: str = "void") -> Value | None:
        """Call a function of this module, a pointer to one, or an intrinsic or C function by its name."""
        if isinstance(callee, Function):
            returns, name = callee.returns, f"@{callee.name}"
        elif isinstance(callee, Value):
            name = callee.name
        else:
            name = f"@{callee}"
            types = ", ".join(argument.type for argument in arguments)
            self.module.declarations.setdefault(name, f"declare {returns} {name}({types})")
        text = f"call {returns} {name}({', '.join(map(str, arguments))})"
        if returns != "void":
            return self.emit(text, returns)
        self._lines.append(text)
        return None

    def math(self, name: str, *arguments: Value) -> Value:
        """An intrinsic on vectors of floats, whose result is one too."""
        result = self.call(f"llvm.{name}.v{LANES}f32", arguments, FLOATS)
        assert result is not None
        return result

    def largest(self, value: Value) -> Value:
        """Of the lanes."""
        result = self.call(f"llvm.vector.reduce.fmax.v{LANES}f32", [value], "float")
        assert result is not None
        return result

    def total(self, value: Value) -> Value:
        """Of the lanes."""
        name = f"@llvm.vector.reduce.fadd.v{LANES}f32"
        self.module.declarations.setdefault(name, f"declare float {name}(float, {FLOATS})")
        # Free to add in any order, so that LLVM adds halves, and not lane after lane.
        return self.emit(f"call reassoc float {name}(float 0.0, {value})", "float")

    def prefetch(self, pointer: Value) -> None:
        """Have the cache line brought near."""
        one, all_levels = self.constant(1, "i32"), self.constant(3, "i32")
        self.call("llvm.prefetch.p0", [pointer, self.constant(0, "i32"), all_levels, one])

    def labels(self, *names: str) -> list[str]:
        number = self._next()
        return [f"{name}_{number}" for name in names]

    def label(self, name: str) -> None:
        self._lines.append(f"{name}:")

    def jump(self, name: str) -> None:
        self._lines.append(f"br label %{name}")

    def branch(self, condition: Value, yes: str, no: str) -> None:
        self._lines.append(f"br {condition}, label %{yes}, label %{no}")

    def give(self, value: Value | None = None) -> None:
        """Return."""
        self._lines.append("ret void" if value is None else f"ret {value}")

    @contextmanager
    def loop(self, start: Value | int, stop: Value | int, step: Value | int = 1) -> Iterator[Value]:
        """The body of a loop over an i64."""
        head, body, end = self.labels("head", "body", "end")
        index, stop = self.variable(start), self.constant(stop)
        self.jump(head)
        self.label(head)
        current = index.get()
        self.branch(current < stop, body, end)
        self.label(body)
        yield current
        index.set(current + step)
        self.jump(head)
        self.label(end)

    @contextmanager
    def when(self, condition: Value) -> Iterator[None]:
        then, end = self.labels("then", "end")
        self.branch(condition, then, end)
        self.label(then)
        yield
        self.jump(end)
        self.label(end)

    def switch(self, value: Value, cases: Sequence[int], write: Callable[[int], None]) -> None:
        """`write` writes what is done for a case."""
        end, *labels = self.labels("end", *(f"case{case}" for case in cases))
        places = " ".join(f"i64 {case}, label %{label}" for case, label in zip(cases, labels, strict=True))
        self._lines.append(f"switch {value}, label %{end} [{places}]")
        for case, label in zip(cases, labels, strict=True):
            self.label(label)
            write(case)
            self.jump(end)
        self.label(end)


class Variable:
    """A value that changes; LLVM keeps it in a register."""

    def __init__(self, type_: str, pointer: Value) -> None:
        self.type, self.pointer = type_, pointer

    def get(self) -> Value:
        return self.pointer.function.load(self.pointer, self.type)

    def set(self, value: Value) -> None:
        assert value.type == self.type, f"{value.type} into {self.type}"
        self.pointer.function.store(value, self.pointer)
