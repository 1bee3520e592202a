"""paged_attention on a CPU, without copying pages.

    unit: a row, up to 48 of its query rows (tokens x heads of a KV head), a KV head
    ┌──────────────────────────────────────────────────────────────────────────────────┐
    │ for 32 keys at a time, from the first that any query sees to the last:           │
    │   keys [32, D] ── transposed, 16 x 16 in registers ──> [D, 32] in the cache      │
    │   scores [queries, 32] = queries x keys, 12 query rows at a time                 │
    │   scale, cap, mask; running maximum and sum of each query; scores -> weights     │
    │   sums [queries, D] += weights x values, the values where they lie in their page │
    └──────────────────────────────────────────────────────────────────────────────────┘

While a chunk is worked on the next one's lines are fetched: a page ends where the processor's own prefetching stops. XLA's
threads share the units. A query's result is the same bits whatever other rows there are and however its prompt was cut.
"""

import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.llvm.code import FLOATS, INTS, LANES, SHORTS, Function, Module, Value, vector
from kernels_pallas.llvm.foreign_call import Buffer, define_call, define_parallel_for
from kernels_pallas.llvm.library import register, unavailable_reason
from kernels_pallas.llvm.matmul import multiply_add, rounded_to_bfloat16

_CHUNK = 2 * LANES  # keys
_QUERY_ROWS = 48
# Sums that stay in registers: scores of so many query rows with a chunk, and outputs of so many with 4 vectors of their width.
_SCORE_ROWS, _OUTPUT_ROWS, _OUTPUT_VECTORS = 12, 6, 4
_LOG2_E = math.log2(math.e)
_NOTHING = -3e38  # below every score
_CACHE_LINE = 64


def llvm_refusal(
    *, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: str, cache_dtype: str
) -> str | None:
    """Why these kernels cannot serve a call on this machine; None if they can."""
    if cache_dtype != dtype:
        return f"it needs a KV cache of the queries' type {dtype}, not {cache_dtype}"
    smallest = 32 if dtype == "bfloat16" else 16
    if head_dim % LANES or not smallest <= head_dim <= 256:
        return f"it needs a head size from {smallest} to 256 that is a multiple of {LANES}, not {head_dim}"
    if block_size % LANES:
        return f"it needs a block size that is a multiple of {LANES}, not {block_size}"
    if num_heads // num_kv_heads > _QUERY_ROWS:
        return f"it needs at most {_QUERY_ROWS} query heads a KV head, not {num_heads // num_kv_heads}"
    return unavailable_reason(dtype)


def register_paged_attention(dtype: str, head_dim: int) -> str:
    """Have the kernel compiled; the name that XLA calls it by."""
    return register(f"paged_attention_{dtype}_{head_dim}", _writer(dtype == "bfloat16", head_dim))


def paged_attention_llvm(
    q: jax.Array,
    kv_cache: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_start_loc: jax.Array,
    *,
    scale: float,
    sliding_window: int | None,
    logit_soft_cap: float | None,
    sinks: jax.Array | None,
    decode_only: bool,
) -> jax.Array:
    """See `kernels_pallas.paged_attention.paged_attention`. With `decode_only` row r's only query is token r."""
    target = register_paged_attention(q.dtype.name, q.shape[2])
    if sinks is None:
        sinks = jnp.full(q.shape[1], -jnp.inf, jnp.float32)
    numbers = np.array([scale, logit_soft_cap or 0.0], np.float32)
    switches = np.array([sliding_window or 0, decode_only], np.int32)
    call = jax.ffi.ffi_call(target, jax.ShapeDtypeStruct(q.shape, q.dtype))
    return call(q, kv_cache, block_tables, seq_lens, query_start_loc, sinks, numbers, switches)


@functools.cache
def _writer(pairs: bool, head_dim: int) -> Callable[[Module, str], None]:
    return functools.partial(_write_attention, pairs=pairs, head_dim=head_dim)


class _Kernel:
    """What the functions of a module agree on.

    Attributes:
        element: of the arrays. 16-bit numbers are moved as i16.
        unit, steps: the keys are multiplied in steps, each of one float32 or of two bfloat16, which are read as one i32.
        widths: a query's output is summed in groups of so many vectors.
    """

    def __init__(self, module: Module, pairs: bool, head_dim: int) -> None:
        self.module, self.pairs, self.head_dim = module, pairs, head_dim
        self.element, self.unit = ("i16", "i32") if pairs else ("float", "float")
        self.steps = head_dim // 2 if pairs else head_dim
        whole, rest = divmod(head_dim // LANES, _OUTPUT_VECTORS)
        self.widths = [_OUTPUT_VECTORS] * whole + [rest] * bool(rest)


def _write_attention(module: Module, name: str, *, pairs: bool, head_dim: int) -> None:
    parallel_for = define_parallel_for(module)
    kernel = _Kernel(module, pairs, head_dim)
    unit = _define_unit(kernel)

    def write(call: Function, frame: Value, operands: Sequence[Buffer], result: Buffer) -> None:
        q, cache, tables, seq_lens, starts, sinks, numbers, switches = operands
        num_tokens, num_heads, num_kv_heads = q.dim(0), q.dim(1), cache.dim(2)
        group = num_heads // num_kv_heads
        # A unit has a token at least.
        units = call.call("malloc", [num_tokens * _UNIT_BYTES], "ptr")
        assert units is not None
        result_bytes = num_tokens * num_heads * (head_dim * (2 if pairs else 4))
        call.call("memset", [result.data, call.constant(0, "i32"), result_bytes], "ptr")
        decode_only = switches.data.field(4, "i32") > 0
        num_units = _list_units(
            call, units, tables.dim(0), seq_lens.data, starts.data, decode_only, call.constant(_QUERY_ROWS) // group
        )
        data = call.array("i64", len(_FIELDS))
        arrays = [operand.data for operand in (q, cache, tables, sinks, numbers, switches)]
        sizes = [num_heads, num_kv_heads, cache.dim(3), tables.dim(1), group]
        call.store_fields(data, [*arrays, result.data, units, *sizes])
        call.call(parallel_for, [frame, num_units * num_kv_heads, call.address_of(unit), data])
        call.call("free", [units])

    define_call(module, name, 8, write)


# What the units of a call share.
_FIELDS = {
    **dict.fromkeys(("q", "cache", "tables", "sinks", "numbers", "switches", "out", "units"), "ptr"),
    **dict.fromkeys(("num_heads", "num_kv_heads", "block_size", "pages", "group"), "i64"),
}
# A unit: its row, its first token, how many tokens, and the position of the first; int32.
_UNIT_BYTES = 16


def _list_units(
    call: Function, units: Value, num_rows: Value, seq_lens: Value, starts: Value, decode_only: Value, most_tokens: Value
) -> Value:
    """Write down the units of all rows; how many there are."""
    count = call.variable(0)
    with call.loop(0, num_rows) as row:
        length = seq_lens.at(row, "i32").field(0, "i32").widened()
        start = call.select(decode_only, row, starts.at(row, "i32").field(0, "i32").widened())
        stop = call.select(decode_only, row + 1, starts.at(row + 1, "i32").field(0, "i32").widened())
        num_tokens = call.select(length > 0, stop - start, 0)
        with call.loop(0, num_tokens, most_tokens) as done:
            unit = units.at(count.get() * _UNIT_BYTES, "i8")
            fields = (row, start + done, call.minimum(num_tokens - done, most_tokens), length - num_tokens + done)
            for index, field in enumerate(fields):
                call.store(field.narrowed(), unit.at(index, "i32"))
            count.set(count.get() + 1)
    return count.get()


def _define_unit(kernel: _Kernel) -> Function:
    """unit(data, i): the queries of a unit with a KV head."""
    scores_of = [_define_scores(kernel, rows) for rows in range(1, _SCORE_ROWS + 1)]
    outputs_of = {
        (rows, width): _define_outputs(kernel, rows, width)
        for rows in range(1, _OUTPUT_ROWS + 1)
        for width in dict.fromkeys(kernel.widths)
    }
    transpose, weigh, prefetch = _define_transpose(kernel), _define_weights(kernel), _define_prefetch(kernel)

    unit = Function(kernel.module, "unit", ["ptr", "i64"])
    data, index = unit.arguments
    shared = {name: data.field(8 * position, type_) for position, (name, type_) in enumerate(_FIELDS.items())}
    num_heads, num_kv_heads, group = shared["num_heads"], shared["num_kv_heads"], shared["group"]
    block_size, head_dim, steps = shared["block_size"], kernel.head_dim, kernel.steps
    entry = shared["units"].at((index // num_kv_heads) * _UNIT_BYTES, "i8")
    row, token, count, position = (entry.field(4 * field, "i32").widened() for field in range(4))
    kv_head = index % num_kv_heads
    rows = count * group
    window = shared["switches"].field(0, "i32").widened()
    windowed = window > 0

    queries = unit.array(kernel.unit, _QUERY_ROWS * steps)
    keys = unit.array(kernel.unit, _CHUNK * steps)
    scores = unit.array("float", _QUERY_ROWS * _CHUNK)
    outputs = unit.array("float", _QUERY_ROWS * head_dim)
    largest, totals = unit.array("float", _QUERY_ROWS), unit.array("float", _QUERY_ROWS * LANES)

    def head_of(base: Value, i: Value, g: Value) -> Value:
        """Of token i of the unit, the g-th head of the KV head."""
        return base.at(((token + i) * num_heads + kv_head * group + g) * head_dim, kernel.element)

    with unit.loop(0, count) as i, unit.loop(0, group) as g:
        query = i * group + g
        _copy_query(kernel, head_of(shared["q"], i, g), queries.at(query * steps, kernel.unit))
        for at in range(0, head_dim, LANES):
            unit.store(unit.constant(0, FLOATS), outputs.at(query * head_dim + at, "float"))
        # A sink is a score that is there from the start, without a value.
        sink = shared["sinks"].at(kv_head * group + g, "float").field(0, "float") * _LOG2_E
        has_sink = sink > _NOTHING
        unit.store(unit.select(has_sink, sink, _NOTHING), largest.at(query, "float"))
        one = unit.first_lane(unit.select(has_sink, unit.constant(1, "float"), 0))
        unit.store(one, totals.at(query * LANES, "float"))

    stop = position + count
    first_key = unit.select(windowed, unit.maximum(position + 1 - window, 0), 0)

    def keys_at(key: Value) -> Value:
        """Where a key lies that is the first of 16."""
        page = shared["tables"].at(row * shared["pages"] + key // block_size, "i32").field(0, "i32").widened()
        place = ((page * 2 * num_kv_heads + kv_head) * block_size + key % block_size) * head_dim
        return shared["cache"].at(place, kernel.element)

    values_behind = num_kv_heads * block_size * head_dim
    with unit.loop(first_key // _CHUNK, (stop + (_CHUNK - 1)) // _CHUNK) as chunk:
        halves = []
        for half in range(2):
            key = chunk * _CHUNK + half * LANES
            # What a page holds behind the row's last key is no number to add up, not even times zero.
            present = unit.minimum(unit.maximum(stop - key, 0), LANES)
            # Nor is what lies before the window, whose pages may be another row's by now.
            present = unit.select(key + LANES > first_key, present, 0)
            values = unit.variable(shared["cache"])
            with unit.when(present > 0):
                place = keys_at(key)
                unit.call(transpose, [place, keys.at(half * LANES, kernel.unit)])
                values.set(place.at(values_behind, kernel.element))
            halves.append((present, values.get()))
            following = key + _CHUNK
            with unit.when(following < stop):
                place = keys_at(following)
                unit.call(prefetch, [place])
                unit.call(prefetch, [place.at(values_behind, kernel.element)])
        with unit.loop(0, rows, _SCORE_ROWS) as query:
            arguments = [queries.at(query * steps, kernel.unit), keys, scores.at(query * _CHUNK, "float")]
            left = unit.minimum(rows - query, _SCORE_ROWS)
            unit.switch(left, range(1, _SCORE_ROWS + 1), lambda n, a=arguments: unit.call(scores_of[n - 1], a))
        with unit.loop(0, count) as i, unit.loop(0, group) as g:
            query, end = i * group + g, position + i + 1
            begin = unit.select(windowed, end - window, 0)
            rows_of_query = [scores.at(query * _CHUNK, "float"), outputs.at(query * head_dim, "float")]
            state = [largest.at(query, "float"), totals.at(query * LANES, "float")]
            limits = [(chunk * _CHUNK).narrowed(), begin.narrowed(), end.narrowed()]
            unit.call(weigh, [*rows_of_query, *state, shared["numbers"], *limits])
        for half, (present, values) in enumerate(halves):
            with unit.loop(0, rows, _OUTPUT_ROWS) as query:

                def add(n: int, query: Value = query, half: int = half, present: Value = present, values: Value = values) -> None:
                    weights, at = scores.at(query * _CHUNK + half * LANES, "float"), 0
                    for width in kernel.widths:
                        place = outputs.at(query * head_dim + at, "float")
                        unit.call(outputs_of[n, width], [weights, values.at(at, kernel.element), place, present])
                        at += width * LANES

                unit.switch(unit.minimum(rows - query, _OUTPUT_ROWS), range(1, _OUTPUT_ROWS + 1), add)

    with unit.loop(0, count) as i, unit.loop(0, group) as g:
        query = i * group + g
        total = unit.total(unit.load(totals.at(query * LANES, "float"), FLOATS))
        inverse = unit.splat(unit.constant(1, "float") / total)
        out = head_of(shared["out"], i, g)
        for at in range(0, head_dim, LANES):
            value = unit.load(outputs.at(query * head_dim + at, "float"), FLOATS) * inverse
            unit.store(rounded_to_bfloat16(value) if kernel.pairs else value, out.at(at, kernel.element))
    unit.give()
    return unit


def _starts(steps: int) -> list[int]:
    """Where vectors of 16 begin that cover `steps`; the last may overlap the one before."""
    return [min(start, steps - LANES) for start in range(0, steps, LANES)]


def _copy_query(kernel: _Kernel, query: Value, place: Value) -> None:
    for start in _starts(kernel.steps):
        value = query.function.load(query.at(start, kernel.unit), vector(kernel.unit))
        query.function.store(value, place.at(start, kernel.unit))


def _define_scores(kernel: _Kernel, rows: int) -> Function:
    """scores(queries [rows, steps], keys [steps, 32], scores [rows, 32]): their products."""
    function = Function(kernel.module, f"scores{rows}", ["ptr", "ptr", "ptr"])
    queries, keys, scores = function.arguments
    sums = [[function.variable(function.constant(0, FLOATS)) for _ in range(2)] for _ in range(rows)]
    with function.loop(0, kernel.steps) as k:
        vectors = [function.load(keys.at(k * _CHUNK + v * LANES, kernel.unit), vector(kernel.unit)) for v in range(2)]
        for r in range(rows):
            query = function.splat(function.load(queries.at(k + r * kernel.steps, kernel.unit), kernel.unit))
            for v in range(2):
                sums[r][v].set(multiply_add(query, vectors[v], sums[r][v].get()))
    for r in range(rows):
        for v in range(2):
            function.store(sums[r][v].get(), scores.at(r * _CHUNK + v * LANES, "float"))
    function.give()
    return function


def _define_outputs(kernel: _Kernel, rows: int, width: int) -> Function:
    """outputs(weights [rows, 16] of 32, values [16, D], outputs [rows, D], n): add n values, `width` vectors of each."""
    function = Function(kernel.module, f"outputs{rows}x{width}", ["ptr", "ptr", "ptr", "i64"])
    weights, values, outputs, count = function.arguments
    places = [[outputs.at(r * kernel.head_dim + v * LANES, "float") for v in range(width)] for r in range(rows)]
    sums = [[function.variable(function.load(place, FLOATS)) for place in of_row] for of_row in places]
    with function.loop(0, count) as key:
        vectors = [_load_floats(values.at(key * kernel.head_dim + v * LANES, kernel.element), kernel.pairs) for v in range(width)]
        for r in range(rows):
            weight = function.splat(function.load(weights.at(key + r * _CHUNK, "float"), "float"))
            for v in range(width):
                sums[r][v].set(multiply_add(weight, vectors[v], sums[r][v].get()))
    for r in range(rows):
        for v in range(width):
            function.store(sums[r][v].get(), places[r][v])
    function.give()
    return function


def _load_floats(pointer: Value, rounded: bool) -> Value:
    """16 numbers as float32."""
    if not rounded:
        return pointer.function.load(pointer, FLOATS)
    return (pointer.function.load(pointer, SHORTS).cast(INTS, "zext") << 16).cast(FLOATS)


def _define_transpose(kernel: _Kernel) -> Function:
    """transpose(keys [16, D], out [steps, 16] of 32)."""
    function = Function(kernel.module, "transpose", ["ptr", "ptr"])
    keys, out = function.arguments
    for start in _starts(kernel.steps):
        rows = []
        for key in range(LANES):
            place = keys.at(key * kernel.head_dim, kernel.element).at(start, kernel.unit)
            rows.append(function.load(place, vector(kernel.unit)))
        for step, column in enumerate(_transposed(rows)):
            function.store(column, out.at((start + step) * _CHUNK, kernel.unit))
    function.give()
    return function


def _transposed(rows: Sequence[Value]) -> list[Value]:
    """16 vectors of 16: exchange quarters off the diagonal, then those of each quarter, and so on."""
    rows = list(rows)
    for size in (8, 4, 2, 1):
        upper = [lane if not lane & size else (lane ^ size) + LANES for lane in range(LANES)]
        lower = [lane | size if not lane & size else lane + LANES for lane in range(LANES)]
        for i in range(LANES):
            if not i & size:
                pair = rows[i], rows[i | size]
                rows[i], rows[i | size] = (pair[0].function.shuffle(*pair, lanes) for lanes in (upper, lower))
    return rows


def _define_prefetch(kernel: _Kernel) -> Function:
    """prefetch(place): the lines of 16 keys or values."""
    function = Function(kernel.module, "prefetch", ["ptr"])
    (place,) = function.arguments
    for line in range(0, LANES * kernel.head_dim * (2 if kernel.pairs else 4), _CACHE_LINE):
        function.prefetch(place.at(line, "i8"))
    function.give()
    return function


def _define_weights(kernel: _Kernel) -> Function:
    """weigh(scores [32], output [D], largest, totals [16], numbers, first key, begin, end): a query's scores become weights.

    Those of keys from `begin` to before `end` are relative to the largest score so far; what was summed before is scaled to it.
    """
    arguments = ["ptr", "ptr", "ptr", "ptr", "ptr", "i32", "i32", "i32"]
    function = Function(kernel.module, "weigh", arguments)
    scores, output, largest, totals, numbers, first_key, begin, end = function.arguments
    scale, cap = numbers.field(0, "float"), numbers.field(4, "float")
    places = [scores.at(v * LANES, "float") for v in range(2)]
    values = [function.variable(function.load(place, FLOATS) * function.splat(scale)) for place in places]
    with function.when(cap > 0):
        for value in values:
            value.set(_tanh(value.get() / function.splat(cap)) * function.splat(cap))
    masks, exponents = [], []
    for v, value in enumerate(values):
        key = function.splat(first_key) + function.constants(range(v * LANES, (v + 1) * LANES), "i32")
        masks.append(function.both(key >= function.splat(begin), key < function.splat(end)))
        exponents.append(function.select(masks[v], value.get() * _LOG2_E, _NOTHING))
    old = function.load(largest, "float")
    new = function.maximum(function.largest(function.maximum(*exponents)), old)
    total = function.variable(function.load(totals, FLOATS))
    with function.when(new > old):
        function.store(new, largest)
        factor = _exp2(function.splat(old - new))
        total.set(total.get() * factor)
        for at in range(0, kernel.head_dim, LANES):
            place = output.at(at, "float")
            function.store(function.load(place, FLOATS) * factor, place)
    for place, mask, exponent in zip(places, masks, exponents, strict=True):
        weight = function.select(mask, _exp2(exponent - function.splat(new)), 0)
        function.store(weight, place)
        total.set(total.get() + weight)
    function.store(total.get(), totals)
    function.give()
    return function


def _exp2(exponent: Value) -> Value:
    """2 to the exponent, at most 0, to 2e-7 of its value; 0 below 2^-126, and NaN of NaN."""
    power, scale = _exp2_parts(exponent)
    return exponent.function.math("fma", power, scale, scale)


def _exp2_parts(exponent: Value) -> tuple[Value, Value]:
    """2^rest - 1 and 2^whole, with whole + rest the exponent. Taylor's series on [-1/2, 1/2]."""
    function = exponent.function
    lowest = function.constant(-127, FLOATS)  # which stands for 0
    # The maximum with NaN is what comes second.
    whole = function.math("rint", function.maximum(exponent, lowest))
    rest = function.maximum(lowest, exponent) - whole
    coefficients = [math.log(2) ** n / math.factorial(n) for n in range(1, 8)]
    power = function.constant(coefficients.pop(), FLOATS)
    for coefficient in reversed(coefficients):
        power = function.math("fma", power, rest, function.constant(coefficient, FLOATS))
    return power * rest, ((whole.cast(INTS, "fptosi") + 127) << 23).cast(FLOATS)


def _tanh(value: Value) -> Value:
    """(1 - e) / (1 + e) with e = exp(-2 |x|), and the sign of x. e - 1 is not taken from e, which near 0 would leave few bits."""
    function = value.function
    power, scale = _exp2_parts(function.math("fabs", value) * (-2 * _LOG2_E))
    less = function.math("fma", power, scale, scale - 1)
    return function.math("copysign", less / (less + 2), value)
