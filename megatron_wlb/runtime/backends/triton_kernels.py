"""Triton kernels of the `triton` backend: forward, dQ and dK/dV of one call, without atomics.

Entry e attends query rows [cu_q[e], cu_q[e + 1]) to key rows [cu_k[e], cu_k[e + 1]), aligned to the bottom right: with
`ahead` more keys than queries, query i sees keys i + ahead - window to i + ahead, counted from the begins of the entry.
Where `causal` is 0, `ahead` is the number of keys, so that all are seen.

Which rows a program works on is found in the kernel. Entry e gets the programs from cu[e] // BLOCK + e on, at least as
many as it has blocks, so cu[entries] // BLOCK + entries programs, which the host knows, are enough; the others return.

Shapes: q, dq [sq, Hq, D], k, dk [P, Hkv, D], v, dv [P, Hkv, DV], out, dout [sq, Hq, DV], lse and delta [Hq, sq];
strides are those of rows and heads, and D and DV are padded with zeros to D_PAD and DV_PAD, powers of two.
"""

import triton
import triton.language as tl

# The exponentials are powers of two, which is what the hardware has.
_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)
# Score of a hidden key. Finite: where blocks of queries are longer than those of keys, a row may begin with a block of
# which its window shows nothing. That gives weights which the first visible key scales down to 0; -inf would give NaN.
_HIDDEN = tl.constexpr(-1.0e30)

# Differ between micro-batches: what triton must not compile anew for, values and whether 16 divides an address.
_VARYING = {
    "do_not_specialize": ["entries", "num_queries", "window", "causal"],
    "do_not_specialize_on_alignment": ["cu_q", "cu_k"],
}


@triton.jit
def _block(cu, entries, program, BLOCK: tl.constexpr):
    """Entry of a program, and where its block begins in the entry; that may be past the entry's end."""
    first, last = 0, entries - 1
    while first < last:
        middle = (first + last + 1) // 2
        if tl.load(cu + middle) // BLOCK + middle <= program:
            first = middle
        else:
            last = middle - 1
    return first, (program - tl.load(cu + first) // BLOCK - first) * BLOCK


@triton.jit
def _rows(tensor, begin, stride, rows, columns, num_rows, D: tl.constexpr):
    """Rows begin + rows of one head, [BLOCK, columns]; zeros past num_rows and past D."""
    pointers = tensor + (begin + rows[:, None]).to(tl.int64) * stride + columns[None, :]
    return tl.load(pointers, mask=(rows[:, None] < num_rows) & (columns[None, :] < D), other=0.0)


@triton.jit
def _store(tensor, begin, stride, rows, columns, num_rows, values, D: tl.constexpr):
    pointers = tensor + (begin + rows[:, None]).to(tl.int64) * stride + columns[None, :]
    mask = (rows[:, None] < num_rows) & (columns[None, :] < D)
    tl.store(pointers, values.to(tensor.dtype.element_ty), mask=mask)


@triton.jit(**_VARYING)
def forward_kernel(
    q, k, v, out, lse, cu_q, cu_k, entries, num_queries, scale, window, causal,
    q_row, q_head, k_row, k_head, v_row, v_head, out_row, out_head,
    GROUP: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program for a block of queries and a query head: grid (sq // BLOCK_Q + entries, Hq)."""
    # Last blocks first: they see most keys.
    entry, start = _block(cu_q, entries, tl.num_programs(0) - 1 - tl.program_id(0), BLOCK_Q)
    q_begin, k_begin = tl.load(cu_q + entry), tl.load(cu_k + entry)
    q_len, k_len = tl.load(cu_q + entry + 1) - q_begin, tl.load(cu_k + entry + 1) - k_begin
    if start >= q_len:
        return
    head, ahead = tl.program_id(1), k_len - q_len * causal
    k_of_head, v_of_head = k + head // GROUP * k_head, v + head // GROUP * v_head
    i, columns, v_columns = start + tl.arange(0, BLOCK_Q), tl.arange(0, D_PAD), tl.arange(0, DV_PAD)
    queries = _rows(q + head * q_head, q_begin, q_row, i, columns, q_len, D)
    highest = tl.full([BLOCK_Q], _HIDDEN, tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    values = tl.zeros([BLOCK_Q, DV_PAD], tl.float32)
    for first in range(tl.maximum(start + ahead - window, 0), tl.minimum(start + BLOCK_Q + ahead, k_len), BLOCK_K):
        j = first + tl.arange(0, BLOCK_K)
        keys = _rows(k_of_head, k_begin, k_row, j, columns, k_len, D)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * (scale * _LOG2_E)
        back = i[:, None] + ahead - j[None, :]
        scores = tl.where((back >= 0) & (back <= window) & (j[None, :] < k_len), scores, _HIDDEN)
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        p = tl.exp2(scores - new_highest[:, None])
        shrink = tl.exp2(highest - new_highest)
        highest, total = new_highest, total * shrink + tl.sum(p, 1)
        p = p.to(v.dtype.element_ty)
        values *= shrink[:, None]
        values += tl.dot(p, _rows(v_of_head, k_begin, v_row, j, v_columns, k_len, DV), input_precision="ieee")
    _store(out + head * out_head, q_begin, out_row, i, v_columns, q_len, values / total[:, None], DV)
    tl.store(lse + head * num_queries + q_begin + i, (highest + tl.log2(total)) * _LN_2, mask=i < q_len)


@triton.jit(**_VARYING)
def dq_kernel(
    dout, q, k, v, out, lse, dq, delta, cu_q, cu_k, entries, num_queries, scale, window, causal,
    dout_row, dout_head, q_row, q_head, k_row, k_head, v_row, v_head, out_row, out_head, dq_row, dq_head,
    GROUP: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """As `forward_kernel`; also leaves delta = sum(dout * out) over DV for `dkv_kernel`."""
    entry, start = _block(cu_q, entries, tl.num_programs(0) - 1 - tl.program_id(0), BLOCK_Q)
    q_begin, k_begin = tl.load(cu_q + entry), tl.load(cu_k + entry)
    q_len, k_len = tl.load(cu_q + entry + 1) - q_begin, tl.load(cu_k + entry + 1) - k_begin
    if start >= q_len:
        return
    head, ahead = tl.program_id(1), k_len - q_len * causal
    k_of_head, v_of_head = k + head // GROUP * k_head, v + head // GROUP * v_head
    i, columns, v_columns = start + tl.arange(0, BLOCK_Q), tl.arange(0, D_PAD), tl.arange(0, DV_PAD)
    queries = _rows(q + head * q_head, q_begin, q_row, i, columns, q_len, D)
    do = _rows(dout + head * dout_head, q_begin, dout_row, i, v_columns, q_len, DV)
    o = _rows(out + head * out_head, q_begin, out_row, i, v_columns, q_len, DV)
    row_delta = tl.sum(do.to(tl.float32) * o.to(tl.float32), 1)
    per_row = head * num_queries + q_begin + i
    tl.store(delta + per_row, row_delta, mask=i < q_len)
    row_lse = tl.load(lse + per_row, mask=i < q_len, other=0.0) * _LOG2_E
    gradient = tl.zeros([BLOCK_Q, D_PAD], tl.float32)
    for first in range(tl.maximum(start + ahead - window, 0), tl.minimum(start + BLOCK_Q + ahead, k_len), BLOCK_K):
        j = first + tl.arange(0, BLOCK_K)
        keys = _rows(k_of_head, k_begin, k_row, j, columns, k_len, D)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * (scale * _LOG2_E)
        back = i[:, None] + ahead - j[None, :]
        visible = (back >= 0) & (back <= window) & (j[None, :] < k_len)
        p = tl.exp2(tl.where(visible, scores - row_lse[:, None], _HIDDEN))
        values = _rows(v_of_head, k_begin, v_row, j, v_columns, k_len, DV)
        dp = tl.dot(do, tl.trans(values), input_precision="ieee")
        ds = p * (dp - row_delta[:, None])
        gradient += tl.dot(ds.to(k.dtype.element_ty), keys, input_precision="ieee")
    _store(dq + head * dq_head, q_begin, dq_row, i, columns, q_len, gradient * scale, D)


@triton.jit(**_VARYING)
def dkv_kernel(
    dout, q, k, v, lse, delta, dk, dv, cu_q, cu_k, entries, num_queries, scale, window, causal,
    dout_row, dout_head, q_row, q_head, k_row, k_head, v_row, v_head, dk_row, dk_head, dv_row, dv_head,
    GROUP: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program for a block of keys and a key head: grid (P // BLOCK_K + entries, Hkv).

    A key belongs to one entry of the call, so nobody else adds to its dK and dV.
    """
    entry, start = _block(cu_k, entries, tl.program_id(0), BLOCK_K)
    q_begin, k_begin = tl.load(cu_q + entry), tl.load(cu_k + entry)
    q_len, k_len = tl.load(cu_q + entry + 1) - q_begin, tl.load(cu_k + entry + 1) - k_begin
    ahead = k_len - q_len * causal
    first_query, stop_query = tl.maximum(start - ahead, 0), tl.minimum(start + BLOCK_K - ahead + window, q_len)
    if (start >= k_len) | (first_query >= stop_query):
        return
    k_of_head, v_of_head = k + tl.program_id(1) * k_head, v + tl.program_id(1) * v_head
    j, columns, v_columns = start + tl.arange(0, BLOCK_K), tl.arange(0, D_PAD), tl.arange(0, DV_PAD)
    keys = _rows(k_of_head, k_begin, k_row, j, columns, k_len, D)
    values = _rows(v_of_head, k_begin, v_row, j, v_columns, k_len, DV)
    k_gradient = tl.zeros([BLOCK_K, D_PAD], tl.float32)
    v_gradient = tl.zeros([BLOCK_K, DV_PAD], tl.float32)
    for head in range(tl.program_id(1) * GROUP, tl.program_id(1) * GROUP + GROUP):
        for first in range(first_query, stop_query, BLOCK_Q):
            i = first + tl.arange(0, BLOCK_Q)
            queries = _rows(q + head * q_head, q_begin, q_row, i, columns, q_len, D)
            do = _rows(dout + head * dout_head, q_begin, dout_row, i, v_columns, q_len, DV)
            per_row = head * num_queries + q_begin + i
            row_lse = tl.load(lse + per_row, mask=i < q_len, other=0.0) * _LOG2_E
            row_delta = tl.load(delta + per_row, mask=i < q_len, other=0.0)
            scores = tl.dot(keys, tl.trans(queries), input_precision="ieee") * (scale * _LOG2_E)
            back = i[None, :] + ahead - j[:, None]
            # Rows past the end have dout = 0, and add nothing.
            p = tl.exp2(tl.where((back >= 0) & (back <= window), scores - row_lse[None, :], _HIDDEN))
            v_gradient += tl.dot(p.to(dout.dtype.element_ty), do, input_precision="ieee")
            dp = tl.dot(values, tl.trans(do), input_precision="ieee")
            ds = p * (dp - row_delta[None, :])
            k_gradient += tl.dot(ds.to(q.dtype.element_ty), queries, input_precision="ieee")
    old = _rows(dk + tl.program_id(1) * dk_head, k_begin, dk_row, j, columns, k_len, D)
    _store(dk + tl.program_id(1) * dk_head, k_begin, dk_row, j, columns, k_len, old + k_gradient * scale, D)
    old = _rows(dv + tl.program_id(1) * dv_head, k_begin, dv_row, j, v_columns, k_len, DV)
    _store(dv + tl.program_id(1) * dv_head, k_begin, dv_row, j, v_columns, k_len, old + v_gradient, DV)
