"""Paged attention in Triton: decode over a list of work items, the merge of its partial results, and prefill.

    decode    block (w, k, i)   item w's keys, KV head k, part i of the row's queries  -> partial result, log of its sum
    merge     block (r, k, i)   the partial results of row r, in turn                  -> the row's tokens in the output
    prefill   block (b, k)      queries of one row times the query heads of KV head k  -> their tokens in the output

A block's queries are the rows of one tile of M: row m is query m // G of head m % G. Keys are worked on in tiles, whose pages are
looked up in the block table; Triton keeps the loads of the next tiles in flight. The softmax is the online one (Milakov and
Gimelshein, 2018, arXiv 1805.02867), in powers of 2.

Names in capitals are static, and `scale`, `cap` and `window` too: D_PADDED is the next power of 2 of the head size D, B the block
size, K the KV heads, G the query heads of each. 0 stands for no cap and no window.

With FP8 the cache is uint8, the bits of float8_e4m3fn. Its tiles are widened between load and product, in integers: no GPU before
Ada converts such numbers. k_scale_ptr and v_scale_ptr are then float32 [K], factors of a KV head's logits and of its results.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
# The largest logit of no logits. Finite, so that differences of two of them are no NaN.
NO_LOGIT = tl.constexpr(-1e30)
# float16 has one bit of exponent more than float8_e4m3fn and a bias that is 8 larger: the same bits, in their places there, are
# the number divided by this, below the normal numbers too. The scales make up for it.
WIDENED = tl.constexpr(256.0)


@triton.jit
def _halves(words):
    """uint32 with the bits of a float8_e4m3fn in the upper byte of each half -> with those of a float16 in each half."""
    rest = (words >> 1) & 0x3F803F80
    # All bits but the sign are set in NaN alone. There 1 more is a carry, into the bit that a NaN of float16 lacks.
    return (words & 0x80008000) | rest | ((rest + 0x00800080) & 0x40004000)


@triton.jit
def widen(words, dtype: tl.constexpr):
    """uint32 [N, W], each the bits of four float8_e4m3fn -> these numbers divided by WIDENED, [N, 4 W], exactly.

    `dtype` is float16, bfloat16 or float32.
    """
    even, odd = _halves(words << 8), _halves(words)
    even = tl.join(even.to(tl.uint16), (even >> 16).to(tl.uint16))
    odd = tl.join(odd.to(tl.uint16), (odd >> 16).to(tl.uint16))
    bits = tl.reshape(tl.join(even, odd), [words.shape[0], 4 * words.shape[1]])
    return bits.to(tl.float16, bitcast=True).to(tl.float32).to(dtype)


@triton.jit
def _attend(
    acc, best, total, q, kv_ptr, table_ptr, head, tile, length, positions, scale,
    cap: tl.constexpr, window: tl.constexpr, MASKED: tl.constexpr, FP8: tl.constexpr,
    D: tl.constexpr, D_PADDED: tl.constexpr, B: tl.constexpr, K: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of keys: weighted sums [M, D_PADDED], largest logits [M] and sums of weights [M], before and after.

    `positions` [M] are those of the queries in the row. Without MASKED all of them see the whole tile. With FP8, kv_ptr points to
    words of four numbers, and the sums are of values divided by WIDENED; `scale` is that of the products with such keys.
    """
    W: tl.constexpr = D // 4 if FP8 else D
    W_PADDED: tl.constexpr = D_PADDED // 4 if FP8 else D_PADDED
    keys = tile * TILE + tl.arange(0, TILE)
    w = tl.arange(0, W_PADDED)
    if MASKED:
        # What lies behind the row's end may be NaN, which a weight of 0 does not undo: it is not loaded.
        inside = keys < length
        block = tl.load(table_ptr + keys // B, mask=inside, other=0)
        mask = inside[:, None] & (w < W)[None, :] if W != W_PADDED else inside[:, None]
        k_mask = inside[None, :] & (w < W)[:, None] if W != W_PADDED else inside[None, :]
        other = 0
    else:
        block = tl.load(table_ptr + keys // B)
        mask = (w < W)[None, :] if W != W_PADDED else None
        k_mask = (w < W)[:, None] if W != W_PADDED else None
        other = 0 if W != W_PADDED else None
    place = (block.to(tl.int64) * (2 * K) + head) * (B * W) + (keys % B) * W
    v_ptr = kv_ptr + K * B * W
    if FP8:
        # One thread widens a word, and the numbers go through shared memory to those that multiply them. Single bytes would be
        # loaded where the product wants them, and each warp of a prefill block would widen all of the tile. Both before the
        # products: the threads wait for each other once.
        k = tl.trans(widen(tl.load(kv_ptr + place[:, None] + w[None, :], mask=mask, other=other), q.dtype))
        v = widen(tl.load(v_ptr + place[:, None] + w[None, :], mask=mask, other=other), q.dtype)
    else:
        # K as [D, TILE]: turned round after the load, it would all have to be in registers at once.
        k = tl.load(kv_ptr + place[None, :] + w[:, None], mask=k_mask, other=other)
    scores = tl.dot(q, k, input_precision=PRECISION)
    if cap != 0.0:
        # cap * tanh(x / cap); exp2 may be 0 or infinite, either is right.
        scores = cap * LOG2_E - (2.0 * cap * LOG2_E) / (tl.exp2(scores * (2.0 * LOG2_E * scale / cap)) + 1.0)
    else:
        scores = scores * (scale * LOG2_E)
    if MASKED:
        seen = (keys[None, :] <= positions[:, None]) & inside[None, :]
        if window != 0:
            seen = seen & (keys[None, :] > positions[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
    new_best = tl.maximum(best, tl.max(scores, 1))
    weights = tl.exp2(scores - new_best[:, None])
    keep = tl.exp2(best - new_best)
    if not FP8:
        v = tl.load(v_ptr + place[:, None] + w[None, :], mask=mask, other=other)
    acc = tl.dot(weights.to(v.dtype), v, acc * keep[:, None], input_precision=PRECISION)
    return acc, new_best, total * keep + tl.sum(weights, 1)


@triton.jit
def decode_kernel(
    q_ptr, kv_ptr, k_scale_ptr, v_scale_ptr, tables_ptr, lens_ptr, starts_ptr, work_ptr, parts_ptr, lse_ptr, pages,
    scale: tl.constexpr, cap: tl.constexpr, window: tl.constexpr, FP8: tl.constexpr,
    D: tl.constexpr, D_PADDED: tl.constexpr, B: tl.constexpr, K: tl.constexpr, G: tl.constexpr, ROWS: tl.constexpr,
    M: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """parts float32 [W, K, ROWS, D] and lse (base 2) [W, K, ROWS] of `work`; idle items write nothing.

    ROWS is G times the most queries that a decode row can have.
    """
    item = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.load(work_ptr + item * 4)
    first_tile = tl.load(work_ptr + item * 4 + 1)
    stop_tile = tl.load(work_ptr + item * 4 + 2)
    queries = tl.load(work_ptr + item * 4 + 3)
    if first_tile >= stop_tile:
        return
    length = tl.load(lens_ptr + row)
    first_token = tl.load(starts_ptr + row)
    rows = tl.program_id(2) * M + tl.arange(0, M)
    d = tl.arange(0, D_PADDED)
    live = rows < queries * G
    mask = live[:, None] & (d < D)[None, :]
    place = (((first_token + rows // G) * K + head) * G + rows % G) * D
    q = tl.load(q_ptr + place[:, None] + d[None, :], mask=mask, other=0.0)
    positions = length - queries + rows // G
    logit_scale = scale
    if FP8:
        kv_ptr = kv_ptr.to(tl.pointer_type(tl.uint32))
        logit_scale = scale * WIDENED * tl.load(k_scale_ptr + head)
    acc = tl.zeros([M, D_PADDED], tl.float32)
    best = tl.full([M], NO_LOGIT, tl.float32)
    total = tl.zeros([M], tl.float32)
    for tile in range(first_tile, stop_tile):
        acc, best, total = _attend(
            acc, best, total, q, kv_ptr, tables_ptr + row * pages, head, tile, length, positions, logit_scale,
            cap, window, True, FP8, D, D_PADDED, B, K, TILE, PRECISION,
        )  # fmt: skip
    safe = tl.where(total > 0.0, total, 1.0)
    result = acc / safe[:, None]
    if FP8:
        result *= WIDENED * tl.load(v_scale_ptr + head)
    place = (item * K + head) * ROWS + rows
    tl.store(parts_ptr + place[:, None] * D + d[None, :], result, mask=mask)
    tl.store(lse_ptr + place, tl.where(total > 0.0, best + tl.log2(safe), NO_LOGIT), mask=live)


@triton.jit
def merge_kernel(
    parts_ptr, lse_ptr, first_item_ptr, num_items_ptr, starts_ptr, sinks_ptr, out_ptr,
    SINKS: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr, K: tl.constexpr, G: tl.constexpr, ROWS: tl.constexpr,
    M: tl.constexpr,
):  # fmt: skip
    """Joins the partial results of a row, weighted by their sums of weights, and writes the tokens [T, K, G, D] of the row.

    Rows without items write nothing. With SINKS, sinks_ptr is float32 [K, G].
    """
    row = tl.program_id(0)
    head = tl.program_id(1)
    num_items = tl.load(num_items_ptr + row)
    if num_items == 0:
        return
    first_item = tl.load(first_item_ptr + row)
    first_token = tl.load(starts_ptr + row)
    queries = tl.load(starts_ptr + row + 1) - first_token
    rows = tl.program_id(2) * M + tl.arange(0, M)
    d = tl.arange(0, D_PADDED)
    live = rows < queries * G
    mask = live[:, None] & (d < D)[None, :]
    acc = tl.zeros([M, D_PADDED], tl.float32)
    if SINKS:
        best = tl.load(sinks_ptr + head * G + rows % G) * LOG2_E
        total = tl.full([M], 1.0, tl.float32)
    else:
        best = tl.full([M], NO_LOGIT, tl.float32)
        total = tl.zeros([M], tl.float32)
    for item in range(first_item, first_item + num_items):
        place = (item * K + head) * ROWS + rows
        lse = tl.load(lse_ptr + place, mask=live, other=NO_LOGIT)
        values = tl.load(parts_ptr + place[:, None] * D + d[None, :], mask=mask, other=0.0)
        new_best = tl.maximum(best, lse)
        keep = tl.exp2(best - new_best)
        weight = tl.exp2(lse - new_best)
        acc = acc * keep[:, None] + values * weight[:, None]
        total = total * keep + weight
        best = new_best
    place = (((first_token + rows // G) * K + head) * G + rows % G) * D
    tl.store(out_ptr + place[:, None] + d[None, :], (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def prefill_kernel(
    q_ptr, kv_ptr, k_scale_ptr, v_scale_ptr, tables_ptr, lens_ptr, starts_ptr, blocks_ptr, sinks_ptr, out_ptr, pages,
    SINKS: tl.constexpr, scale: tl.constexpr, cap: tl.constexpr, window: tl.constexpr, FP8: tl.constexpr,
    D: tl.constexpr, D_PADDED: tl.constexpr, B: tl.constexpr, K: tl.constexpr, G: tl.constexpr,
    M: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Writes the tokens [T, K, G, D] of `blocks` int32 [Q, 2]: row and first query, M // G queries each; -1 for an idle block."""
    PER_BLOCK: tl.constexpr = M // G
    block = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.load(blocks_ptr + block * 2)
    first_query = tl.load(blocks_ptr + block * 2 + 1)
    if first_query < 0:
        return
    length = tl.load(lens_ptr + row)
    first_token = tl.load(starts_ptr + row)
    queries = tl.load(starts_ptr + row + 1) - first_token
    rows = tl.arange(0, M)
    query = first_query + rows // G
    d = tl.arange(0, D_PADDED)
    live = (query < queries) & (rows < PER_BLOCK * G)
    mask = live[:, None] & (d < D)[None, :]
    place = (((first_token + query) * K + head) * G + rows % G) * D
    q = tl.load(q_ptr + place[:, None] + d[None, :], mask=mask, other=0.0)
    logit_scale = scale
    if FP8:
        kv_ptr = kv_ptr.to(tl.pointer_type(tl.uint32))
        logit_scale = scale * WIDENED * tl.load(k_scale_ptr + head)
    acc = tl.zeros([M, D_PADDED], tl.float32)
    if SINKS:
        best = tl.load(sinks_ptr + head * G + rows % G) * LOG2_E
        total = tl.full([M], 1.0, tl.float32)
    else:
        best = tl.full([M], NO_LOGIT, tl.float32)
        total = tl.zeros([M], tl.float32)

    positions = length - queries + query
    lowest = length - queries + first_query
    highest = tl.minimum(lowest + PER_BLOCK, length) - 1
    first_tile = 0
    whole_start = 0
    if window != 0:
        first_tile = tl.maximum(lowest - window + 1, 0) // TILE
        whole_start = tl.maximum(highest - window + TILE, 0) // TILE
    # Tiles from whole_start to whole_stop are seen whole by every query.
    stop_tile = (highest + TILE) // TILE
    whole_stop = tl.maximum((lowest + 1) // TILE, first_tile)
    whole_start = tl.minimum(whole_start, whole_stop)
    table_ptr = tables_ptr + row * pages
    if window != 0:
        for tile in range(first_tile, whole_start):
            acc, best, total = _attend(
                acc, best, total, q, kv_ptr, table_ptr, head, tile, length, positions, logit_scale,
                cap, window, True, FP8, D, D_PADDED, B, K, TILE, PRECISION,
            )  # fmt: skip
    for tile in range(whole_start, whole_stop):
        acc, best, total = _attend(
            acc, best, total, q, kv_ptr, table_ptr, head, tile, length, positions, logit_scale,
            cap, window, False, FP8, D, D_PADDED, B, K, TILE, PRECISION,
        )  # fmt: skip
    for tile in range(whole_stop, stop_tile):
        acc, best, total = _attend(
            acc, best, total, q, kv_ptr, table_ptr, head, tile, length, positions, logit_scale,
            cap, window, True, FP8, D, D_PADDED, B, K, TILE, PRECISION,
        )  # fmt: skip
    # Rows of no query may have seen no key.
    result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    if FP8:
        result *= WIDENED * tl.load(v_scale_ptr + head)
    tl.store(out_ptr + place[:, None] + d[None, :], result.to(out_ptr.dtype.element_ty), mask=mask)
