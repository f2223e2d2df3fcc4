"""Triton kernels of `dspark.block_attention`: one tile a program, of rows or of keys.

Import this module only where it is used: triton is absent on some platforms, and decides at import
whether TRITON_INTERPRET=1 makes it run on the CPU.

Shapes: B sequence, S context slot, A anchor, G block position; T = A * G block rows; n query heads,
k heads of keys and values, R = n / k query heads of a group; d head size. In a kernel M and N are
the rows and keys of a tile, D is d rounded up to a power of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

_LOWEST = tl.constexpr(-1e30)
"""Where running maxima start: finite, so that no lane takes infinity from infinity."""
_CHUNK = tl.constexpr(1024)
"""Anchors that are looked through at a time."""


# The reductions are named by their combining functions: tl.sum and tl.max are jitted themselves,
# for the device, if triton was imported before TRITON_INTERPRET was set.
#
# A tensor [B, heads, T, d] is passed as its pointer and the strides of the first three axes.
@triton.jit
def _of_head(tensor, batch, head):
    """Its part for one sequence and head."""
    return tensor[0] + batch * tensor[1] + head * tensor[2]


@triton.jit
def _pointers(base, first, stride, N: tl.constexpr, D: tl.constexpr):
    """[N, D] from row `first` on. The tile's place is 64 bits wide, what lies within it 32."""
    within = tl.arange(0, N)[:, None] * stride + tl.arange(0, D)[None, :]
    return base + tl.cast(first, tl.int64) * stride + within


@triton.jit
def _row_pointers(tensor, batch, head, first, R: tl.constexpr, M: tl.constexpr, D: tl.constexpr):
    """[M, D] of a group's rows from position `first` on, the heads of a position side by side."""
    i = tl.arange(0, M)
    within = (i // R) * tensor[3] + (i % R) * tensor[2]
    base = _of_head(tensor, batch, head * R) + tl.cast(first, tl.int64) * tensor[3]
    return base + within[:, None] + tl.arange(0, D)[None, :]


@triton.jit
def _row_tile(
    bounds, first, num_slots, num_rows, G: tl.constexpr, R: tl.constexpr, M: tl.constexpr
):
    """Whether each of a tile's rows exists; its context's bounds and its block's first row."""
    i = tl.arange(0, M)
    t = first + i // R
    inside = (i < (M // R) * R) & (t < num_rows)
    block = t // G
    # Rows that do not exist see nothing.
    start = tl.load(bounds[0] + block, mask=inside, other=num_slots).to(tl.int32)
    end = tl.load(bounds[1] + block, mask=inside, other=0).to(tl.int32)
    return inside, start, end, block * G


@triton.jit
def _context_span(inside, start, end, num_slots, N: tl.constexpr):
    """Of a tile of rows: its first context slot, the number of whole tiles from there, its end."""
    some = inside & (end > start)
    low = tl.reduce(tl.where(some, start, num_slots), 0, tl.standard._elementwise_min)
    high = tl.reduce(tl.where(some, end, 0), 0, tl.standard._elementwise_max)
    last_start = tl.reduce(tl.where(inside, start, 0), 0, tl.standard._elementwise_max)
    first_end = tl.reduce(tl.where(inside, end, num_slots), 0, tl.standard._elementwise_min)
    # Rows of one document start together. Where they do not, all is masked.
    whole = tl.where(last_start == low, tl.maximum(first_end - low, 0) // N, 0)
    return low, whole, high


@triton.jit
def _own_span(t, num_rows, step: tl.constexpr, G: tl.constexpr):
    """The own keys that the rows of a tile see: the first one, and the end."""
    last = tl.minimum(t + step, num_rows) - 1
    return t // G * G, (last // G + 1) * G


@triton.jit
def _edge_tile(
    tile, spans, context, own, rows, exists, G: tl.constexpr, N: tl.constexpr, D: tl.constexpr
):
    """A masked tile: of the rows' own keys, then of context that some rows see in part.

    Returns:
        keys and values, and which of them each row sees, [M, N].
    """
    own_tiles, own_first, context_first = spans
    start, end, block = rows
    k_context, k_context_stride, v_context, v_context_stride, num_slots = context
    k_own, k_own_stride, v_own, v_own_stride, num_rows = own
    is_own = tile < own_tiles
    first = tl.where(is_own, own_first + tile * N, context_first + (tile - own_tiles) * N)
    limit = tl.where(is_own, num_rows, num_slots)
    keys = first + tl.arange(0, N)
    there = (keys < limit)[:, None] & exists
    k_base = tl.where(is_own, k_own, k_context)
    k_stride = tl.where(is_own, k_own_stride, k_context_stride)
    v_base = tl.where(is_own, v_own, v_context)
    v_stride = tl.where(is_own, v_own_stride, v_context_stride)
    k = tl.load(_pointers(k_base, first, k_stride, N, D), mask=there, other=0.0)
    v = tl.load(_pointers(v_base, first, v_stride, N, D), mask=there, other=0.0)
    low = tl.where(is_own, block, start)
    high = tl.where(is_own, block + G, end)
    sees = (keys[None, :] >= low[:, None]) & (keys[None, :] < high[:, None])
    return k, v, sees


@triton.jit
def _softmax_step(score, v, acc, top, total, log2_scale):
    """Take in one tile of scores [M, N] and values [N, D]."""
    new = tl.maximum(top, tl.reduce(score, 1, tl.standard._elementwise_max) * log2_scale)
    p = tl.exp2(score * log2_scale - new[:, None])
    shrink = tl.exp2(top - new)
    total = total * shrink + tl.reduce(p, 1, tl.standard._sum_combine)
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return acc, new, total


@triton.jit
def forward_kernel(
    q,
    context_k,
    context_v,
    own_k,
    own_v,
    out,
    lse_ptr,
    copied_k,
    copied_v,
    start_ptr,
    end_ptr,
    num_slots,
    num_rows,
    num_anchors,
    num_batch,
    log2_scale,
    TMA: tl.constexpr,
    G: tl.constexpr,
    R: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    EDGE: tl.constexpr,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
):
    """`lse_ptr` [B, k, T, R] gets the log-sum-exp of base 2."""
    head = tl.program_id(0).to(tl.int64)
    step: tl.constexpr = M // R
    t = (tl.num_programs(1) - 1 - tl.program_id(1)) // num_batch * step
    batch = (tl.program_id(1) % num_batch).to(tl.int64)
    bounds = start_ptr + batch * num_anchors, end_ptr + batch * num_anchors
    inside, start, end, block = _row_tile(bounds, t, num_slots, num_rows, G, R, M)
    low, whole, high = _context_span(inside, start, end, num_slots, N)
    exists = (tl.arange(0, D) < WIDTH)[None, :]
    there = inside[:, None] & exists
    b_q = tl.load(_row_pointers(q, batch, head, t, R, M, D), mask=there, other=0.0)
    ck = _of_head(context_k, batch, head)
    cv = _of_head(context_v, batch, head)
    acc = tl.full([M, D], 0.0, tl.float32)
    top = tl.full([M], _LOWEST, tl.float32)
    total = tl.full([M], 0.0, tl.float32)
    for i in range(0, whole):
        if TMA:
            place = [batch.to(tl.int32), low + i * N, head.to(tl.int32), 0]
            k = copied_k.load(place).reshape(N, D)
            v = copied_v.load(place).reshape(N, D)
        else:
            k = tl.load(_pointers(ck, low + i * N, context_k[3], N, D), mask=exists, other=0.0)
            v = tl.load(_pointers(cv, low + i * N, context_v[3], N, D), mask=exists, other=0.0)
        score = tl.dot(b_q, tl.trans(k), input_precision="ieee")
        acc, top, total = _softmax_step(score, v, acc, top, total, log2_scale)

    low += whole * N
    own_first, own_end = _own_span(t, num_rows, step, G)
    own_tiles = (own_end - own_first + EDGE - 1) // EDGE
    edges = own_tiles + tl.maximum(high - low + EDGE - 1, 0) // EDGE
    spans = own_tiles, own_first, low
    context = ck, context_k[3], cv, context_v[3], num_slots
    own = _of_head(own_k, batch, head), own_k[3], _of_head(own_v, batch, head), own_v[3], num_rows
    rows = start, end, block
    for i in range(0, edges):
        k, v, sees = _edge_tile(i, spans, context, own, rows, exists, G, EDGE, D)
        score = tl.dot(b_q, tl.trans(k), input_precision="ieee")
        score = tl.where(sees, score, float("-inf"))
        acc, top, total = _softmax_step(score, v, acc, top, total, log2_scale)

    b_out = (acc / total[:, None]).to(out[0].dtype.element_ty)
    tl.store(_row_pointers(out, batch, head, t, R, M, D), b_out, mask=there)
    of_rows = (batch * tl.num_programs(0) + head) * num_rows * R + t * R + tl.arange(0, M)
    tl.store(lse_ptr + of_rows, top + tl.log2(total), mask=inside)


@triton.jit
def _queries_step(b_q, b_dout, k, v, sees, lse, delta, acc, log2_scale, MASKED: tl.constexpr):
    """Take in one tile of keys and values [N, D]."""
    score = tl.dot(b_q, tl.trans(k), input_precision="ieee")
    p = tl.exp2(score * log2_scale - lse[:, None])
    if MASKED:
        p = tl.where(sees, p, 0.0)
    dp = tl.dot(b_dout, tl.trans(v), input_precision="ieee")
    ds = p * (dp - delta[:, None])
    return tl.dot(ds.to(k.dtype), k, acc, input_precision="ieee")


@triton.jit
def queries_kernel(
    q,
    context_k,
    context_v,
    own_k,
    own_v,
    out,
    dout,
    dq,
    lse_ptr,
    delta_ptr,
    copied_k,
    copied_v,
    start_ptr,
    end_ptr,
    num_slots,
    num_rows,
    num_anchors,
    num_batch,
    scale,
    log2_scale,
    TMA: tl.constexpr,
    G: tl.constexpr,
    R: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    EDGE: tl.constexpr,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
):
    """Gradient of the queries; `delta_ptr` [B, k, T, R] gets the sums of gradient times output."""
    head = tl.program_id(0).to(tl.int64)
    step: tl.constexpr = M // R
    t = (tl.num_programs(1) - 1 - tl.program_id(1)) // num_batch * step
    batch = (tl.program_id(1) % num_batch).to(tl.int64)
    bounds = start_ptr + batch * num_anchors, end_ptr + batch * num_anchors
    inside, start, end, block = _row_tile(bounds, t, num_slots, num_rows, G, R, M)
    exists = (tl.arange(0, D) < WIDTH)[None, :]
    there = inside[:, None] & exists
    of_rows = (batch * tl.num_programs(0) + head) * num_rows * R + t * R + tl.arange(0, M)
    lse = tl.load(lse_ptr + of_rows, mask=inside, other=float("inf"))
    b_dout = tl.load(_row_pointers(dout, batch, head, t, R, M, D), mask=there, other=0.0)
    b_out = tl.load(_row_pointers(out, batch, head, t, R, M, D), mask=there, other=0.0)
    products = b_out.to(tl.float32) * b_dout.to(tl.float32)
    delta = tl.reduce(products, 1, tl.standard._sum_combine)
    tl.store(delta_ptr + of_rows, delta, mask=inside)
    acc = tl.full([M, D], 0.0, tl.float32)
    b_q = tl.load(_row_pointers(q, batch, head, t, R, M, D), mask=there, other=0.0)
    ck = _of_head(context_k, batch, head)
    cv = _of_head(context_v, batch, head)
    low, whole, high = _context_span(inside, start, end, num_slots, N)
    for i in range(0, whole):
        if TMA:
            place = [batch.to(tl.int32), low + i * N, head.to(tl.int32), 0]
            k = copied_k.load(place).reshape(N, D)
            v = copied_v.load(place).reshape(N, D)
        else:
            k = tl.load(_pointers(ck, low + i * N, context_k[3], N, D), mask=exists, other=0.0)
            v = tl.load(_pointers(cv, low + i * N, context_v[3], N, D), mask=exists, other=0.0)
        acc = _queries_step(b_q, b_dout, k, v, None, lse, delta, acc, log2_scale, False)

    low += whole * N
    own_first, own_end = _own_span(t, num_rows, step, G)
    own_tiles = (own_end - own_first + EDGE - 1) // EDGE
    edges = own_tiles + tl.maximum(high - low + EDGE - 1, 0) // EDGE
    spans = own_tiles, own_first, low
    context = ck, context_k[3], cv, context_v[3], num_slots
    own = _of_head(own_k, batch, head), own_k[3], _of_head(own_v, batch, head), own_v[3], num_rows
    rows = start, end, block
    for i in range(0, edges):
        k, v, sees = _edge_tile(i, spans, context, own, rows, exists, G, EDGE, D)
        acc = _queries_step(b_q, b_dout, k, v, sees, lse, delta, acc, log2_scale, True)
    b_dq = (acc * scale).to(dq[0].dtype.element_ty)
    tl.store(_row_pointers(dq, batch, head, t, R, M, D), b_dq, mask=there)


@triton.jit
def _rows_of_context(bounds, key, num_anchors, N: tl.constexpr):
    """The anchors that see some of the keys from `key` on.

    Returns:
        the first one, the last one plus 1, and where those begin that all see all of these keys.
    """
    a = tl.arange(0, _CHUNK)
    first = num_anchors
    stop = 0
    for chunk in range(0, num_anchors, _CHUNK):
        at = chunk + a
        start = tl.load(bounds[0] + at, mask=at < num_anchors, other=0)
        end = tl.load(bounds[1] + at, mask=at < num_anchors, other=0)
        sees = (end > start) & (end > key) & (start < key + N)
        found = tl.reduce(tl.where(sees, at, num_anchors), 0, tl.standard._elementwise_min)
        first = tl.minimum(first, found)
        found = tl.reduce(tl.where(sees, at + 1, 0), 0, tl.standard._elementwise_max)
        stop = tl.maximum(stop, found)
    whole = first
    for chunk in range(0, num_anchors, _CHUNK):
        at = chunk + a
        start = tl.load(bounds[0] + at, mask=at < num_anchors, other=0)
        end = tl.load(bounds[1] + at, mask=at < num_anchors, other=0)
        part = (at >= first) & (at < stop) & ((start > key) | (end < key + N))
        found = tl.reduce(tl.where(part, at + 1, 0), 0, tl.standard._elementwise_max)
        whole = tl.maximum(whole, found)
    return first, stop, whole


@triton.jit
def _keys_step(
    sums,
    keys_values,
    t,
    t_end,
    key,
    rows,
    bounds,
    batch,
    head,
    log2_scale,
    OWN: tl.constexpr,
    MASKED: tl.constexpr,
    TMA: tl.constexpr,
    G: tl.constexpr,
    R: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
):
    """Take in the rows from position `t` on; those from `t_end` on have no part."""
    dk, dv = sums
    k, v = keys_values
    q, dout, lse_base, delta_base, of_head = rows
    i = tl.arange(0, M)
    position = t + i // R
    inside = (i < (M // R) * R) & (position < t_end)
    there = inside[:, None] & (tl.arange(0, D) < WIDTH)[None, :]
    at = of_head + t * R
    if TMA:
        # What lies outside of the tensors is 0; what belongs to another head gets masked.
        b_q = q.load([batch, t, head * R, 0]).reshape(M, D)
        b_dout = dout.load([batch, t, head * R, 0]).reshape(M, D)
        lse = lse_base.load([at])
        delta = delta_base.load([at])
    else:
        place = tl.cast(batch, tl.int64), tl.cast(head, tl.int64)
        b_q = tl.load(_row_pointers(q, place[0], place[1], t, R, M, D), mask=there, other=0.0)
        b_dout = tl.load(_row_pointers(dout, place[0], place[1], t, R, M, D), mask=there, other=0.0)
        # Rows left out have a probability of 0.
        lse = tl.load(lse_base + at + i, mask=inside, other=float("inf"))
        delta = tl.load(delta_base + at + i, mask=inside, other=0.0)
    score = tl.dot(k, tl.trans(b_q), input_precision="ieee")
    p = tl.exp2(score * log2_scale - lse[None, :])
    if MASKED:
        block = position // G
        if OWN:
            low = block * G
            high = tl.where(inside, low + G, 0)
        else:
            low = tl.load(bounds[0] + block, mask=inside, other=0).to(tl.int32)
            high = tl.load(bounds[1] + block, mask=inside, other=0).to(tl.int32)
        keys = key + tl.arange(0, N)
        p = tl.where((keys[:, None] >= low[None, :]) & (keys[:, None] < high[None, :]), p, 0.0)
    dv = tl.dot(p.to(b_dout.dtype), b_dout, dv, input_precision="ieee")
    dp = tl.dot(v, tl.trans(b_dout), input_precision="ieee")
    ds = (p * (dp - delta[None, :])).to(b_q.dtype)
    dk = tl.dot(ds, b_q, dk, input_precision="ieee")
    return dk, dv


@triton.jit
def keys_kernel(
    q,
    context_k,
    context_v,
    dout,
    dk,
    dv,
    lse,
    delta,
    start_ptr,
    end_ptr,
    num_slots,
    num_rows,
    num_anchors,
    num_batch,
    scale,
    log2_scale,
    TMA: tl.constexpr,
    G: tl.constexpr,
    R: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
):
    """Gradients of N context slots. With TMA, q, dout, lse and delta are given as descriptors."""
    head = tl.program_id(0)
    step: tl.constexpr = M // R
    key = tl.program_id(1) // num_batch * N
    batch = tl.program_id(1) % num_batch
    wide_batch, wide_head = batch.to(tl.int64), head.to(tl.int64)
    bounds = start_ptr + wide_batch * num_anchors, end_ptr + wide_batch * num_anchors
    of_head = (batch * tl.num_programs(0) + head) * num_rows * R
    there = (key + tl.arange(0, N) < num_slots)[:, None] & (tl.arange(0, D) < WIDTH)[None, :]
    ck = _of_head(context_k, wide_batch, wide_head)
    cv = _of_head(context_v, wide_batch, wide_head)
    k = tl.load(_pointers(ck, key, context_k[3], N, D), mask=there, other=0.0)
    v = tl.load(_pointers(cv, key, context_v[3], N, D), mask=there, other=0.0)
    b_dk = tl.full([N, D], 0.0, tl.float32)
    b_dv = tl.full([N, D], 0.0, tl.float32)
    rows = q, dout, lse, delta, of_head
    first, stop, whole = _rows_of_context(bounds, key, num_anchors, N)
    first *= G
    stop *= G
    whole = tl.minimum(whole * G, stop)
    tiles = (stop - whole) // step
    # What some rows see in part, and the last few rows.
    edges = (whole - first + step - 1) // step
    rest = whole + tiles * step
    for i in range(0, edges + tl.where(rest < stop, 1, 0)):
        t = tl.where(i < edges, first + i * step, rest)
        t_end = tl.where(i < edges, whole, stop)
        b_dk, b_dv = _keys_step(
            (b_dk, b_dv), (k, v), t, t_end, key, rows, bounds, batch, head, log2_scale,
            False, True, TMA, G, R, M, N, WIDTH, D,
        )  # fmt: skip
    # Backwards, so that programs which start together meet the same rows at a time.
    for i in range(0, tiles):
        t = whole + (tiles - 1 - i) * step
        b_dk, b_dv = _keys_step(
            (b_dk, b_dv), (k, v), t, stop, key, rows, bounds, batch, head, log2_scale,
            False, False, TMA, G, R, M, N, WIDTH, D,
        )  # fmt: skip
    dk_to = _pointers(_of_head(dk, wide_batch, wide_head), key, dk[3], N, D)
    tl.store(dk_to, (b_dk * scale).to(dk[0].dtype.element_ty), mask=there)
    dv_to = _pointers(_of_head(dv, wide_batch, wide_head), key, dv[3], N, D)
    tl.store(dv_to, b_dv.to(dv[0].dtype.element_ty), mask=there)


# Not a branch of the kernel above: ptxas would have every product of both wait for itself.
@triton.jit
def own_kernel(
    q,
    own_k,
    own_v,
    dout,
    dk,
    dv,
    lse,
    delta,
    num_rows,
    num_batch,
    scale,
    log2_scale,
    G: tl.constexpr,
    R: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
):
    """Gradients of N own keys and values."""
    head = tl.program_id(0)
    step: tl.constexpr = M // R
    key = tl.program_id(1) // num_batch * N
    batch = tl.program_id(1) % num_batch
    wide_batch, wide_head = batch.to(tl.int64), head.to(tl.int64)
    of_head = (batch * tl.num_programs(0) + head) * num_rows * R
    there = (key + tl.arange(0, N) < num_rows)[:, None] & (tl.arange(0, D) < WIDTH)[None, :]
    ok = _of_head(own_k, wide_batch, wide_head)
    ov = _of_head(own_v, wide_batch, wide_head)
    k = tl.load(_pointers(ok, key, own_k[3], N, D), mask=there, other=0.0)
    v = tl.load(_pointers(ov, key, own_v[3], N, D), mask=there, other=0.0)
    b_dk = tl.full([N, D], 0.0, tl.float32)
    b_dv = tl.full([N, D], 0.0, tl.float32)
    rows = q, dout, lse, delta, of_head
    first, stop = _own_span(key, num_rows, N, G)
    for t in range(first, stop, step):
        b_dk, b_dv = _keys_step(
            (b_dk, b_dv), (k, v), t, stop, key, rows, None, batch, head, log2_scale,
            True, True, False, G, R, M, N, WIDTH, D,
        )  # fmt: skip
    dk_to = _pointers(_of_head(dk, wide_batch, wide_head), key, dk[3], N, D)
    tl.store(dk_to, (b_dk * scale).to(dk[0].dtype.element_ty), mask=there)
    dv_to = _pointers(_of_head(dv, wide_batch, wide_head), key, dv[3], N, D)
    tl.store(dv_to, b_dv.to(dv[0].dtype.element_ty), mask=there)
