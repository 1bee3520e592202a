"""Products of activations with weights that lie as the registers want them.

A packed weight is cut into panels of 32 columns. Within a panel the numbers of a row are neighbours, so a row is two vectors:

    float32   [ceil(N / 32), K, 32]
    bfloat16  [ceil(N / 32), K / 2, 32, 2]    two neighbouring rows side by side, which the processor multiplies and adds at once

A product goes panel by panel, and there 14 rows of activations at a time: 28 sums stay in registers while the panel passes, each
of its vectors loaded once for the 14 rows. XLA's threads share the panels. A sum's order depends on nothing but K, so a row's
result is the same bits whatever other rows there are.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from kernels_pallas.llvm.code import FLOATS, INTS, LANES, PAIRS, SHORTS, Function, Module, Value, vector
from kernels_pallas.llvm.foreign_call import Buffer, define_call, define_parallel_for
from kernels_pallas.llvm.library import register, unavailable_reason

_VECTORS = 2
PANEL = _VECTORS * LANES
# With the panel's vectors and the activation, as many sums as there are registers.
_TILE_ROWS = 14
# What a thread takes at a time, so that many rows are work for many threads where there are few panels.
_UNIT_ROWS = 12 * _TILE_ROWS


def packing_refusal(in_features: int, dtype: str) -> str | None:
    """Why a weight [in, out] cannot be packed here; None if it can."""
    if dtype == "bfloat16" and in_features % 2:
        return f"bfloat16 needs an even number of rows, not {in_features}"
    return unavailable_reason(dtype)


def packed_shape(in_features: int, out_features: int, dtype: str) -> tuple[int, ...]:
    """Of a packed weight [in, out]."""
    panels = -(-out_features // PANEL)
    return (panels, in_features, PANEL) if dtype == "float32" else (panels, in_features // 2, PANEL, 2)


def pack(weight: jax.Array) -> jax.Array:
    """weight [in, out] as a packed one, the last panel filled up with zeros."""
    in_features, out_features = weight.shape
    padded = jnp.pad(weight, ((0, 0), (0, -out_features % PANEL)))
    if weight.dtype == jnp.float32:
        return padded.reshape(in_features, -1, PANEL).transpose(1, 0, 2)
    return padded.reshape(in_features // 2, 2, -1, PANEL).transpose(2, 0, 3, 1)


def packed_columns(weight: jax.Array, columns: jax.Array) -> jax.Array:
    """Columns int [T] of a packed weight [in, out] -> [T, in]."""
    panels, lanes = columns // PANEL, columns % PANEL
    return weight[panels, :, lanes].reshape(columns.shape[0], -1)


def packed_matmul(
    x: jax.Array,
    weight: jax.Array,
    out_features: int,
    *,
    num_rows: jax.Array | None = None,
    out_dtype: jnp.dtype | None = None,
) -> jax.Array:
    """x [T, in] times a packed weight [in, out] -> [T, out], summed in float32.

    Args:
        x: float32 or bfloat16, as the weight.
        out_features: out, without what fills up the last panel.
        num_rows: int32 []; rows of x from there on are padding, whose products are zeros and cost nothing. None for none.
        out_dtype: that of x (also None) or float32.

    Raises:
        ValueError: if the shapes or types do not fit, or this machine cannot run it.
    """
    if x.ndim != 2:
        raise ValueError(f"x must be [T, in], got {x.shape}")
    in_features, dtype = x.shape[1], x.dtype.name
    out_dtype = jnp.dtype(out_dtype or x.dtype)
    if (refusal := packing_refusal(in_features, dtype)) is not None:
        raise ValueError(f"a packed product cannot be used here: {refusal}")
    expected = packed_shape(in_features, out_features, dtype)
    if weight.shape != expected or weight.dtype != x.dtype:
        raise ValueError(f"weight must be {dtype} {expected}, got {weight.dtype} {weight.shape}")
    if out_dtype not in (x.dtype, jnp.float32):
        raise ValueError(f"out_dtype must be {dtype} or float32, got {out_dtype}")
    target = register_matmul(dtype, out_dtype.name)
    num_rows = jnp.int32(x.shape[0]) if num_rows is None else num_rows
    if num_rows.shape != () or num_rows.dtype != jnp.int32:
        raise ValueError(f"num_rows must be int32 (), got {num_rows.dtype} {num_rows.shape}")
    return jax.ffi.ffi_call(target, jax.ShapeDtypeStruct((x.shape[0], out_features), out_dtype))(x, weight, num_rows)


def register_matmul(dtype: str, out_dtype: str) -> str:
    """Have the kernel compiled; the name that XLA calls it by."""
    return register(f"matmul_{dtype}_{out_dtype}", _writer(dtype == "bfloat16", out_dtype == "bfloat16"))


@functools.cache
def _writer(pairs: bool, rounded: bool) -> Callable[[Module, str], None]:
    return functools.partial(_write_matmul, pairs=pairs, rounded=rounded)


def _write_matmul(module: Module, name: str, *, pairs: bool, rounded: bool) -> None:
    """
    Args:
        pairs: x and weight are bfloat16; a step along K takes two of their numbers, which are read as one i32.
        rounded: the result is bfloat16.
    """
    parallel_for = define_parallel_for(module)
    tiles = [_define_tile(module, rows, pairs, rounded) for rows in range(1, _TILE_ROWS + 1)]
    unit = _define_unit(module, tiles, pairs, rounded)

    def write(call: Function, frame: Value, operands: Sequence[Buffer], result: Buffer) -> None:
        x, weight, num_rows = operands
        columns = result.dim(1)
        rows = call.minimum(call.maximum(num_rows.data.field(0, "i32").widened(), 0), x.dim(0))
        row_bytes = columns * (2 if rounded else 4)
        padding = result.data.at(rows * row_bytes, "i8")
        call.call("memset", [padding, call.constant(0, "i32"), (x.dim(0) - rows) * row_bytes], "ptr")
        steps = x.dim(1) // 2 if pairs else x.dim(1)
        blocks = (rows + (_UNIT_ROWS - 1)) // _UNIT_ROWS
        panels = (columns + (PANEL - 1)) // PANEL
        data = call.array("i64", 7)
        call.store_fields(data, [x.data, weight.data, result.data, rows, columns, steps, blocks])
        call.call(parallel_for, [frame, panels * blocks, call.address_of(unit), data])

    define_call(module, name, 3, write)


def _define_tile(module: Module, rows: int, pairs: bool, rounded: bool) -> Function:
    """tile(x, panel, out, steps, row length of out, columns in use): [rows, 32] of the result."""
    tile = Function(module, f"tile{rows}", ["ptr", "ptr", "ptr", "i64", "i64", "i64"])
    x, panel, out, steps, out_stride, columns = tile.arguments
    element = "i32" if pairs else "float"
    sums = [[tile.variable(tile.constant(0, FLOATS)) for _ in range(_VECTORS)] for _ in range(rows)]
    with tile.loop(0, steps) as k:
        vectors = [tile.load(panel.at(k * PANEL + v * LANES, element), vector(element)) for v in range(_VECTORS)]
        for r in range(rows):
            activation = tile.splat(tile.load(x.at(steps * r + k, element), element))
            for v in range(_VECTORS):
                sums[r][v].set(multiply_add(activation, vectors[v], sums[r][v].get()))
    lane = tile.constants(range(LANES), "i64")
    masks = [lane < tile.splat(columns - v * LANES) for v in range(_VECTORS)]
    for r in range(rows):
        for v in range(_VECTORS):
            value = sums[r][v].get()
            place = out.at(out_stride * r + v * LANES, "i16" if rounded else "float")
            tile.store_lanes(rounded_to_bfloat16(value) if rounded else value, place, masks[v])
    tile.give()
    return tile


def _define_unit(module: Module, tiles: Sequence[Function], pairs: bool, rounded: bool) -> Function:
    """unit(data, i): up to _UNIT_ROWS rows of a panel of the result."""
    unit = Function(module, "unit", ["ptr", "i64"])
    data, index = unit.arguments
    x, weight, out = (data.field(8 * field, "ptr") for field in range(3))
    num_rows, num_columns, steps, blocks = (data.field(8 * field, "i64") for field in range(3, 7))
    panel, block = index // blocks, index % blocks
    element = "i32" if pairs else "float"
    packed = weight.at(panel * steps * PANEL, element)
    column = panel * PANEL
    stop = unit.minimum((block + 1) * _UNIT_ROWS, num_rows)
    with unit.loop(block * _UNIT_ROWS, stop, _TILE_ROWS) as row:
        place = out.at(row * num_columns + column, "i16" if rounded else "float")
        arguments = [x.at(row * steps, element), packed, place, steps, num_columns, num_columns - column]
        unit.switch(
            unit.minimum(stop - row, _TILE_ROWS),
            range(1, _TILE_ROWS + 1),
            lambda rows: unit.call(tiles[rows - 1], arguments),
        )
    unit.give()
    return unit


def multiply_add(left: Value, right: Value, total: Value) -> Value:
    """left * right + total, in float32; of pairs of bfloat16 (as i32) the sum of both products."""
    function = left.function
    if left.type == FLOATS:
        return function.math("fma", left, right, total)
    result = function.call("llvm.x86.avx512bf16.dpbf16ps.512", [total, left.cast(PAIRS), right.cast(PAIRS)], FLOATS)
    assert result is not None
    return result


def rounded_to_bfloat16(value: Value) -> Value:
    """A vector of float32 as the bits of bfloat16, to the nearest, to even between two; NaN stays NaN."""
    bits = value.cast(INTS)
    rounded = (bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16
    is_nan = value.function.emit(f"fcmp uno {value}, {value.name}", vector("i1"))
    # Adding may carry the last bits of a NaN into its sign.
    return value.function.select(is_nan, value.function.constant(0x7FC0, INTS), rounded).cast(SHORTS, "trunc")
