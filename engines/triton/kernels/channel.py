"""Gradients under a gate a key channel (KDA, GDN-2); `gradient` has the algorithm and its names.

`products_key_kernel` makes plain M and X first, then `gradient_key_kernel` (one program a K-block)
meets D[i, j] in levels, as no single anchor is safe for it: chunks are of 16 or 32 steps; rows of
the second block of 16 and columns of the first meet at the first row of the second, and no factor
exceeds 1. Inside a block, pairs of ever smaller blocks go on down to single steps. Where no
exponent exceeds 2^100, the middle of a block, row 7, is its anchor instead and serves all of it;
not for linear gates, whose dg must not be a difference. Tiles are [BK, C], a warp to 16 channels,
so that what was accumulated is multiplied by tiles of all steps without leaving registers.
`beta_key_kernel` adds up the K-blocks' shares of a head's db. GDN-2's guard of b is recomputed, and
its gradient is that of b as it is used.
"""

import triton
import triton.language as tl

from lagraph.engines.triton.kernels.factor import (
    GRID,
    GROWTH,
    MIDDLE,
    REACH,
    _inverse_norm,
    anchored,
    guard_rows,
    guarded,
    inverse_growth,
    load_beta,
    operand,
    rest,
)
from lagraph.engines.triton.kernels.gate import amplitude
from lagraph.engines.triton.kernels.index import locate
from lagraph.engines.triton.kernels.products import (
    beta_gradient,
    chunk_products,
    gate_gradient,
)

__all__ = [
    "beta_key_kernel",
    "gradient_key_kernel",
    "products_key_kernel",
]


@triton.jit
def _paired(o_row, o_col, B):
    """Whether a pairing level holds for a row and a column: of neighbouring blocks of B steps."""
    return (o_row // B % 2 == 1) & (o_col // B == o_row // B - 1)


@triton.jit
def _level_sum(o_x, o_t, B):
    """Of a row or column x and a gate t, as zeros and ones: the pairs that the gate decays are
    those of rows from t on, for t in a later block, and of columns before t in an earlier one."""
    m_late = o_t // B % 2 == 1
    m_sum = (o_t // B == o_x // B) & ((m_late & (o_x >= o_t)) | ((m_late == 0) & (o_x < o_t)))
    return tl.where(m_sum, 1.0, 0.0)


@triton.jit
def _tiles(p_m, p_x, p_mt, p_xt, m_tile, m_turned, WIDE: tl.constexpr):
    """M and X, and both transposed, where masks hold."""
    b_m = tl.load(p_m, mask=m_tile, other=0.0).to(WIDE)
    b_x = tl.load(p_x, mask=m_tile, other=0.0).to(WIDE)
    b_mt = tl.load(p_mt, mask=m_turned, other=0.0).to(WIDE)
    b_xt = tl.load(p_xt, mask=m_turned, other=0.0).to(WIDE)
    return b_m, b_x, b_mt, b_xt


@triton.jit
def _pairs(b_dq, b_f, b_h, b_m, b_x, b_mt, b_xt, b_qr, b_er, b_kc, PREC: tl.constexpr):
    """Adds the pairs of decayed rows q, e and columns k [BK, C] to dq, f and h, whose own decay is
    left to the caller."""
    b_kc = operand(b_kc, b_m.dtype, PREC)
    b_dq = tl.dot(b_kc, b_mt, b_dq, input_precision=PREC)
    b_f = tl.dot(b_kc, b_xt, b_f, input_precision=PREC)
    b_h = tl.dot(operand(b_qr, b_m.dtype, PREC), b_m, b_h, input_precision=PREC)
    b_h = tl.dot(operand(-b_er, b_m.dtype, PREC), b_x, b_h, input_precision=PREC)
    return b_dq, b_f, b_h


@triton.jit
def _settled(b_x):
    """x as the accumulator of a product with zeros. What is computed from it stays in that layout,
    in which it becomes a left operand without passing through shared memory."""
    b_a = tl.zeros([b_x.shape[0], 16], tl.bfloat16)
    b_b = tl.zeros([16, b_x.shape[1]], tl.bfloat16)
    return tl.dot(b_a, b_b, b_x)


@triton.jit
def _step_sums(b_x, b_w, b_sum, PREC: tl.constexpr):
    """Adds x w [BK, C], w of zeros and ones. 16-bit products take x in two parts."""
    if b_w.dtype == tl.float32:
        b_sum = tl.dot(b_x, b_w, b_sum, input_precision=PREC)
    else:
        b_top = (b_x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
        b_sum = tl.dot(b_top.to(b_w.dtype), b_w, b_sum)
        b_sum = tl.dot((b_x - b_top).to(b_w.dtype), b_w, b_sum)
    return b_sum


@triton.jit
def _block_sums(b_dq, b_f, b_h, b_qr, b_er, b_kc, m_late):
    """What gates of one block of 16 decay of the other [BK, C]: all rows of the later, all columns
    of the earlier."""
    b_rows = tl.sum(tl.where(m_late, b_qr * b_dq - b_er * b_f, 0.0), axis=1)
    b_cols = tl.sum(tl.where(m_late, 0.0, b_kc * b_h), axis=1)
    return tl.where(m_late, b_cols[:, None], b_rows[:, None])


@triton.jit
def _state_rows(
    p_s,
    p_ds,
    p_u,
    p_y,
    p_do,
    o_oi,
    m_t,
    o_k,
    C: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PART: tl.constexpr,
    PREC: tl.constexpr,
):
    """`state_products` with channels in rows: (dO S)^T, (Y S)^T, (U dS)^T [BK, C], and
    sum_v dS S [BK]."""
    o_i = tl.arange(0, C)
    o_c = tl.arange(0, BK)
    b_q = tl.zeros([BK, C], tl.float32)
    b_f = tl.zeros([BK, C], tl.float32)
    b_h = tl.zeros([BK, C], tl.float32)
    b_c = tl.zeros([BK, BK], tl.float32)
    m_t = m_t[:, None]
    for i_v in range(0, V, BV):
        o_v = i_v + tl.arange(0, BV)
        o_tile = o_i[:, None] * V + o_v[None, :]
        o_state = o_v[None, :] * K + o_k[:, None]
        b_s = tl.load(p_s + o_state)  # [BK, BV]
        b_ds = tl.load(p_ds + o_state)  # [BK, BV]
        b_do = tl.load(p_do + o_oi[:, None] + o_v[None, :], mask=m_t, other=0.0)  # [C, BV]
        b_q = tl.dot(b_s, tl.trans(b_do), b_q, input_precision=PREC)
        b_y = tl.load(p_y + o_tile)  # [C, BV]
        b_f = tl.dot(b_s, tl.trans(b_y), b_f, input_precision=PREC)
        b_u = tl.load(p_u + o_tile)  # [C, BV]
        b_h = tl.dot(b_ds, tl.trans(b_u), b_h, input_precision=PREC)
        # Of which the diagonal is wanted: fewer instructions than sums along rows. The operand is
        # loaded for itself, so that both loads are staged.
        b_st = tl.load(p_ds + o_v[:, None] * K + o_k[None, :])  # [BV, BK]
        b_c = tl.dot(b_s, b_st, b_c, input_precision=PREC)
        if PART:
            b_y = tl.load(p_y + C * V + o_tile)
            b_f = tl.dot(b_s, tl.trans(b_y), b_f, input_precision=PREC)
            b_u = tl.load(p_u + C * V + o_tile)
            b_h = tl.dot(b_ds, tl.trans(b_u), b_h, input_precision=PREC)
    b_c = tl.sum(tl.where(o_c[:, None] == o_c[None, :], b_c, 0.0), axis=1)
    return b_q, b_f, b_h, b_c


@triton.jit
def _near(
    b_dq,
    b_f,
    b_h,
    b_dg,
    b_q,
    b_e,
    b_k,
    b_l,
    b_mid,
    b_mid1,
    b_end,
    b_end1,
    b_before,
    b_after,
    p_p,
    p_t,
    p_ones,
    C: tl.constexpr,
    BK: tl.constexpr,
    PART: tl.constexpr,
    IO: tl.constexpr,
    PREC: tl.constexpr,
    SUM_PREC: tl.constexpr,
):
    """Decays and pairs of steps where the middle rows of blocks of 16 can be anchors: completes dq,
    f and h [BK, C], but for a row's own column, and returns what a gate decays of the rows of its
    block if it comes no later; the rest is added to dg.

    All is in units of the middle of each block, rounded to a power of two: so no gate changes what
    rounding does to the steps before it. Weaker decays than 2^-26 may come out as zeros."""
    NB: tl.constexpr = C // 16
    o_i = tl.arange(0, C)
    o_n = o_i // 16
    m_late = (o_n == 1)[None, :]
    o_low = o_i[:, None] * C + o_i[None, :]
    o_up = o_i[None, :] * C + o_i[:, None]
    p_m, p_x, p_mt, p_xt = p_p + o_low, p_t + o_low, p_p + o_up, p_t + o_up
    p_ml, p_xl, p_mlt, p_xlt = p_m + C * C, p_x + C * C, p_mt + C * C, p_xt + C * C
    p_ones += o_low
    m_low = o_i[:, None] > o_i[None, :]
    m_up = o_i[:, None] < o_i[None, :]
    # fp16 cannot hold the columns.
    WIDE: tl.constexpr = tl.float32 if tl.float16 == IO else IO
    WIDE_PREC: tl.constexpr = PREC if PART or tl.float16 != IO else "tf32"
    b_mid = tl.floor(b_mid)
    b_mid1 = tl.floor(b_mid1)
    b_s = b_mid[:, None]
    b_u = tl.exp2(b_mid)[:, None]
    b_v = tl.exp2(b_end - b_mid)[:, None]
    if NB == 2:
        b_s = tl.where(m_late, b_mid1[:, None], b_s)
        # Between the middles: 2^-100 at least, then what rows may lose.
        b_w = tl.exp2(b_end - b_mid)[:, None]
        b_z = tl.exp2(b_mid1)[:, None]
        b_u = tl.where(m_late, b_z * b_before[:, None], b_u)
        b_v = tl.where(m_late, tl.exp2(b_end1 - b_mid1)[:, None], b_v * b_after[:, None])
    if tl.float32 == IO:
        b_x, b_y = anchored(b_l, b_s)
    else:
        b_x = (b_l + GRID) - (b_s + GRID)
        b_y = tl.exp2(-b_x)
        b_x = tl.exp2(b_x)
    b_qr = b_q * b_x
    b_er = b_e * b_x
    b_kc = b_k * b_y
    b_dq *= b_u
    b_f *= b_u
    b_h *= b_v
    b_m = tl.load(p_m).to(WIDE)
    b_a = tl.load(p_x).to(WIDE)
    b_mt = tl.load(p_mt).to(WIDE)
    b_at = tl.load(p_xt).to(WIDE)
    if PART:
        b_ml, b_al, b_mlt, b_alt = _tiles(p_ml, p_xl, p_mlt, p_xlt, m_low, m_up, WIDE)
    b_qw, b_ew, b_kw = b_qr, b_er, b_kc
    b_s = b_h
    if NB == 2:
        b_dg += _block_sums(b_dq, b_f, b_h, b_qr, b_er, b_kc, m_late)
        # Columns of the first block and rows of the second: with each other, where what lies
        # between the middles is missing, and inside their blocks.
        b_qw = tl.where(m_late, b_qr, 0.0)
        b_ew = tl.where(m_late, b_er, 0.0)
        b_kw = tl.where(m_late, 0.0, b_kc)
        b_none = tl.zeros([BK, C], tl.float32)
        b_sq, b_sf, b_sh = _pairs(
            b_none, b_none, b_none, b_m, b_a, b_mt, b_at, b_qw, b_ew, b_kw, WIDE_PREC
        )
        if PART:
            b_sq, b_sf, b_sh = _pairs(
                b_sq, b_sf, b_sh, b_ml, b_al, b_mlt, b_alt, b_qw, b_ew, b_kw, WIDE_PREC
            )
        b_dq += tl.where(m_late, b_z * (b_w * b_sq), b_sq)
        b_f += tl.where(m_late, b_z * (b_w * b_sf), b_sf)
        b_s = tl.where(m_late, b_h, b_h + b_w * (b_z * b_sh))
        b_h = tl.where(m_late, b_h + b_sh, b_s)
        # Then the others.
        b_qw = tl.where(m_late, 0.0, b_qr)
        b_ew = tl.where(m_late, 0.0, b_er)
        b_kw = tl.where(m_late, b_kc, 0.0)
    b_dq, b_f, b_h = _pairs(b_dq, b_f, b_h, b_m, b_a, b_mt, b_at, b_qw, b_ew, b_kw, WIDE_PREC)
    if PART:
        b_dq, b_f, b_h = _pairs(
            b_dq, b_f, b_h, b_ml, b_al, b_mlt, b_alt, b_qw, b_ew, b_kw, WIDE_PREC
        )
    b_rows = b_qr * b_dq - b_er * b_f - b_kc * (b_h - b_s)
    b_dg = _step_sums(b_kc * b_s, tl.load(p_ones), b_dg, SUM_PREC)
    b_dq *= b_x
    b_f *= b_x
    b_h *= b_y
    return b_dq, b_f, b_h, b_dg, b_rows


@triton.jit
def _far(
    b_dq,
    b_f,
    b_h,
    b_dg,
    b_q,
    b_e,
    b_k,
    b_l,
    b_end,
    b_end1,
    b_before,
    b_after,
    p_p,
    p_t,
    p_lk,
    p_ones,
    C: tl.constexpr,
    BK: tl.constexpr,
    K: tl.constexpr,
    PART: tl.constexpr,
    IO: tl.constexpr,
    PREC: tl.constexpr,
    SUM_PREC: tl.constexpr,
):
    """As `_near`, for any gates: levels of pairs of blocks, down to single steps."""
    NB: tl.constexpr = C // 16
    o_i = tl.arange(0, C)
    o_n = o_i // 16
    m_late = (o_n == 1)[None, :]
    o_low = o_i[:, None] * C + o_i[None, :]
    o_up = o_i[None, :] * C + o_i[:, None]
    p_m, p_x, p_mt, p_xt = p_p + o_low, p_t + o_low, p_p + o_up, p_t + o_up
    p_ml, p_xl, p_mlt, p_xlt = p_m + C * C, p_x + C * C, p_mt + C * C, p_xt + C * C
    p_ones += o_low
    # From the start of a block, and to its end.
    b_x = tl.exp2(b_l)
    b_y = b_end[:, None]
    if NB == 2:
        b_y = tl.where(m_late, b_end1[:, None], b_y)
    b_y = tl.exp2(b_y - b_l)
    b_qr = b_q * b_x
    b_er = b_e * b_x
    b_kc = b_k * b_y
    if NB == 2:
        b_dq = tl.where(m_late, b_dq * b_before[:, None], b_dq)
        b_f = tl.where(m_late, b_f * b_before[:, None], b_f)
        b_h = tl.where(m_late, b_h, b_h * b_after[:, None])
        b_dg += _block_sums(b_dq, b_f, b_h, b_qr, b_er, b_kc, m_late)
        # Rows of the second block with columns of the first.
        m_tile = o_n[:, None] > o_n[None, :]
        m_turn = o_n[:, None] < o_n[None, :]
        b_qw = tl.where(m_late, b_qr, 0.0)
        b_ew = tl.where(m_late, b_er, 0.0)
        b_kw = tl.where(m_late, 0.0, b_kc)
        b_m, b_a, b_mt, b_at = _tiles(p_m, p_x, p_mt, p_xt, m_tile, m_turn, IO)
        b_dq, b_f, b_h = _pairs(b_dq, b_f, b_h, b_m, b_a, b_mt, b_at, b_qw, b_ew, b_kw, PREC)
        if PART:
            b_m, b_a, b_mt, b_at = _tiles(p_ml, p_xl, p_mlt, p_xlt, m_tile, m_turn, IO)
            b_dq, b_f, b_h = _pairs(b_dq, b_f, b_h, b_m, b_a, b_mt, b_at, b_qw, b_ew, b_kw, PREC)
    b_rows = b_qr * b_dq - b_er * b_f
    b_dg = _step_sums(b_kc * b_h, tl.load(p_ones), b_dg, SUM_PREC)
    b_dq *= b_x
    b_f *= b_x
    b_h *= b_y
    b_none = tl.zeros([BK, C], tl.float32)
    for i_b in tl.range(0, 4, num_stages=1):
        size = 8 >> i_b
        b_s = tl.load(p_lk + ((o_i // (2 * size) * 2 + 1) * size)[None, :] * K)
        b_s = tl.where((o_i // size % 2 == 1)[None, :], b_l - b_s, b_s - b_l)
        b_s = tl.exp2(b_s)
        b_qr = b_q * b_s
        b_er = b_e * b_s
        b_kc = b_k * b_s
        m_tile = _paired(o_i[:, None], o_i[None, :], size)
        m_turn = _paired(o_i[None, :], o_i[:, None], size)
        b_m, b_a, b_mt, b_at = _tiles(p_m, p_x, p_mt, p_xt, m_tile, m_turn, IO)
        b_sq, b_sf, b_sh = _pairs(
            b_none, b_none, b_none, b_m, b_a, b_mt, b_at, b_qr, b_er, b_kc, PREC
        )
        if PART:
            b_m, b_a, b_mt, b_at = _tiles(p_ml, p_xl, p_mlt, p_xlt, m_tile, m_turn, IO)
            b_sq, b_sf, b_sh = _pairs(
                b_sq, b_sf, b_sh, b_m, b_a, b_mt, b_at, b_qr, b_er, b_kc, PREC
            )
        b_dq += b_s * b_sq
        b_f += b_s * b_sf
        b_h += b_s * b_sh
        b_w = _level_sum(o_i[:, None], o_i[None, :], size).to(p_ones.dtype.element_ty)
        b_dg = _step_sums(b_qr * b_sq - b_er * b_sf + b_kc * b_sh, b_w, b_dg, SUM_PREC)
    return b_dq, b_f, b_h, b_dg, b_rows


@triton.jit(do_not_specialize=["N", "T"])
def products_key_kernel(
    p_v,
    p_w,
    p_beta,
    p_do,
    p_p,
    p_t,
    p_u,
    p_y,
    p_dv,
    p_dw,
    p_sums,
    p_ones,
    p_cu,
    N,
    T,
    s_cu,
    s_vt,
    s_vh,
    s_wt,
    s_wh,
    s_bt,
    s_bh,
    s_ot,
    s_oh,
    s_dvt,
    s_dvh,
    s_dwt,
    s_dwh,
    HV: tl.constexpr,
    HO: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BV: tl.constexpr,
    ERASE_KEY: tl.constexpr,
    SIGMOID: tl.constexpr,
    DOUBLE: tl.constexpr,
    SPLIT: tl.constexpr,
    PART: tl.constexpr,
    PREC: tl.constexpr,
):
    """M and X of a chunk over the tiles of P and W; M's diagonal and Y . v beside them; dv, dw.

    One program leaves zeros and ones [2, C, C] by which `gradient_key_kernel` adds up steps within
    blocks of 16: columns before t, and rows from t on."""
    IO: tl.constexpr = p_v.dtype.element_ty
    pid = tl.program_id(0).to(tl.int64)
    i_h = pid % HO
    o_i = tl.arange(0, C)
    if pid == 0:
        o_x = o_i[:, None]
        o_t = o_i[None, :]
        m_block = o_x // 16 == o_t // 16
        tl.store(p_ones + o_x * C + o_t, tl.where(m_block & (o_x < o_t), 1.0, 0.0))
        tl.store(p_ones + (C + o_x) * C + o_t, tl.where(m_block & (o_x >= o_t), 1.0, 0.0))
    _, i_c, begin, length = locate(pid // HO, p_cu, s_cu, N, T, C, 1)
    if i_c < 0:
        return
    PARTS: tl.constexpr = 2 if SPLIT else 1
    if SPLIT == 2:  # noqa: SIM102
        if (inverse_growth(p_t, pid, C, SPLIT) > GROWTH).to(tl.int32) != PART:
            return
    m_t = o_i < tl.minimum(length - i_c * C, C).to(tl.int32)
    token = begin + i_c * C
    p_v += token * s_vt + (i_h // (HO // HV)) * s_vh
    p_do += token * s_ot + i_h * s_oh
    p_dv += token * s_dvt + i_h * s_dvh
    if p_w is not None:
        p_w += token * s_wt + i_h * s_wh
        p_dw += token * s_dwt + i_h * s_dwh
    b_beta = tl.full([C], 1.0, tl.float32)
    if not ERASE_KEY:
        b_beta = load_beta(p_beta + token * s_bt + i_h * s_bh, o_i * s_bt, m_t, SIGMOID, DOUBLE)
    o_vi = o_i * s_vt
    o_oi = o_i * s_ot
    b_m, b_x, b_yv, _, _, _ = chunk_products(
        p_v, p_w, p_u + pid * (PARTS * C * V), p_y + pid * (PARTS * C * V), p_do, None, None,
        None, p_dv, p_dw, None, None, o_vi, o_i * s_wt, o_oi, o_oi, o_oi, o_i * s_dvt,
        o_i * s_dwt, o_oi, 0, m_t, m_t, b_beta, C, C, V, BV, True, ERASE_KEY, False, PART, PREC,
    )  # fmt: skip
    m_low = o_i[:, None] > o_i[None, :]
    o_tile = pid * (PARTS * C * C) + o_i[:, None] * C + o_i[None, :]
    tl.store(p_p + o_tile, tl.where(m_low, b_m, 0.0).to(IO))
    tl.store(p_t + o_tile, tl.where(m_low, b_x, 0.0).to(IO))
    if PART:
        tl.store(p_p + C * C + o_tile, rest(b_m, IO), mask=m_low)
        tl.store(p_t + C * C + o_tile, rest(b_x, IO), mask=m_low)
    m_same = o_i[:, None] == o_i[None, :]
    tl.store(p_sums + pid * (2 * C) + o_i, tl.sum(tl.where(m_same, b_m, 0.0), axis=1))
    tl.store(p_sums + pid * (2 * C) + C + o_i, b_yv)


@triton.jit(do_not_specialize=["N", "T"])
def gradient_key_kernel(
    p_q,
    p_k,
    p_g,
    p_beta,
    p_alog,
    p_bias,
    p_do,
    p_l,
    p_p,
    p_t,
    p_u,
    p_y,
    p_s,
    p_ds,
    p_sums,
    p_ones,
    p_dq,
    p_dk,
    p_dg,
    p_dbeta,
    p_kf,
    p_dalog,
    p_dbias,
    p_cu,
    N,
    T,
    scale,
    lower,
    s_cu,
    s_qt,
    s_qh,
    s_kt,
    s_kh,
    s_gt,
    s_gh,
    s_bt,
    s_bh,
    s_ot,
    s_oh,
    s_dqt,
    s_dqh,
    s_dkt,
    s_dkh,
    s_dgt,
    s_dgh,
    s_dbt,
    s_dbh,
    H: tl.constexpr,
    HK: tl.constexpr,
    HO: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    GATE: tl.constexpr,
    ERASE_KEY: tl.constexpr,
    GUARD: tl.constexpr,
    NORM: tl.constexpr,
    SIGMOID: tl.constexpr,
    DOUBLE: tl.constexpr,
    SPLIT: tl.constexpr,
    PART: tl.constexpr,
    PREC: tl.constexpr,
):
    IO: tl.constexpr = p_k.dtype.element_ty
    NK: tl.constexpr = K // BK
    NB: tl.constexpr = C // 16
    # Sums over steps by products with zeros and ones, in parts where operands are.
    SUM_PREC: tl.constexpr = PREC if PART or tl.float32 == IO else "tf32"
    pid = tl.program_id(0).to(tl.int64)
    i_k = pid % NK
    tile = pid // NK
    i_h = tile % HO
    slot = tile // HO
    _, i_c, begin, length = locate(slot, p_cu, s_cu, N, T, C, 1)
    if p_dalog is not None:
        p_dalog += (slot * NK + i_k) * HO + i_h
    if p_dbias is not None:
        p_dbias += tile * K + i_k * BK + tl.arange(0, BK)
    if i_c < 0:
        if p_dalog is not None:
            tl.store(p_dalog, 0.0)
        if p_dbias is not None:
            tl.store(p_dbias, tl.zeros([BK], tl.float32))
        return
    PARTS: tl.constexpr = 2 if SPLIT else 1
    if SPLIT == 2:  # noqa: SIM102
        if (inverse_growth(p_t, tile, C, SPLIT) > GROWTH).to(tl.int32) != PART:
            return
    o_i = tl.arange(0, C)
    o_k = i_k * BK + tl.arange(0, BK)
    m_t = o_i < tl.minimum(length - i_c * C, C).to(tl.int32)
    # Everything counts from the chunk's first token: row offsets fit 32 bits.
    token = begin + i_c * C
    p_k += token * s_kt + (i_h // (HO // HK)) * s_kh
    p_q += token * s_qt + (i_h // (HO // H)) * s_qh
    p_g += token * s_gt + i_h * s_gh
    p_beta += token * s_bt + i_h * s_bh
    p_do += token * s_ot + i_h * s_oh
    if p_bias is not None:
        p_bias += i_h * K
    amp = amplitude(p_alog, i_h)
    s_qi = o_i * s_qt
    s_ki = o_i * s_kt
    s_bi = o_i * s_bt
    b_rk = tl.full([C], 1.0, tl.float32)
    b_rq = tl.full([C], 0.0, tl.float32) + scale
    if NORM:
        b_rk = _inverse_norm(p_k, s_ki, m_t, K, BK)
        b_rq *= _inverse_norm(p_q, s_qi, m_t, K, BK)

    if GUARD:
        m_act, m_flat, b_mean, b_eta = guard_rows(
            p_k, p_g, p_beta, p_bias, s_ki, o_i * s_gt, s_bi, b_rk, m_t, amp, lower,
            K, BK, GATE, SIGMOID, DOUBLE, IO,
        )  # fmt: skip

    # Tiles [BK, C]: channels are rows, so that sums over steps and products of pairs take what
    # was accumulated as their left operand, in registers. Loads first: they wait for each other.
    m_at = m_t[None, :] & (o_k >= 0)[:, None]
    o_c = o_k[:, None]
    p_l += tile * ((C + 4 * NB) * K)
    p_lk = p_l + o_c
    b_l = tl.load(p_lk + o_i[None, :] * K)
    b_k = tl.load(p_k + s_ki[None, :] + o_c, mask=m_at, other=0.0)
    b_q = tl.load(p_q + s_qi[None, :] + o_c, mask=m_at, other=0.0)
    b_first = tl.load(p_l + o_k)
    b_mid = tl.load(p_l + MIDDLE * K + o_k)
    b_end = tl.load(p_l + 15 * K + o_k)
    b_mid1, b_end1, b_before, b_after = b_mid, b_end, b_end, b_end
    if NB == 2:
        b_first1 = tl.load(p_l + 16 * K + o_k)
        b_mid1 = tl.load(p_l + (16 + MIDDLE) * K + o_k)
        b_end1 = tl.load(p_l + 31 * K + o_k)
        b_before = tl.load(p_l + (C + 1) * K + o_k)
        b_after = tl.load(p_l + (C + NB) * K + o_k)
    if ERASE_KEY:
        b_b = load_beta(p_beta, s_bi[None, :] + o_c, m_at, SIGMOID, DOUBLE)
        if GUARD:
            b_b = tl.trans(guarded(tl.trans(b_b), m_act, m_flat, b_mean, b_eta, IO))
    else:
        b_b = load_beta(p_beta, s_bi, m_t, SIGMOID, DOUBLE)[None, :]
    p_p += tile * (PARTS * C * C)
    p_t += tile * (PARTS * C * C)
    b_dq, b_f, b_h, b_c = _state_rows(
        p_s + tile * (V * K), p_ds + tile * (V * K), p_u + tile * (PARTS * C * V),
        p_y + tile * (PARTS * C * V), p_do, o_i * s_ot, m_t, o_k, C, K, V, BK, BV, PART, PREC,
    )  # fmt: skip
    b_k = _settled(b_k.to(tl.float32)) * b_rk[None, :]
    b_q = _settled(b_q.to(tl.float32)) * b_rq[None, :]
    b_l = _settled(b_l)
    if ERASE_KEY:
        b_b = _settled(b_b)
    b_e = b_k * b_b

    # Gates <= 0: the ends of a block are farthest from its middle. Linear gates, whose dg is
    # divided by the decay and must not be a difference, are never near.
    far = True
    if GATE != "linear":
        b_far = tl.maximum(b_first - b_mid, b_mid - b_end)
        if NB == 2:
            b_far = tl.maximum(b_far, tl.maximum(b_first1 - b_mid1, b_mid1 - b_end1))
        far = tl.max(b_far, axis=0) >= REACH
    b_all = b_end
    if NB == 2:
        b_all += b_end1
    b_dg = tl.zeros([BK, C], tl.float32) + (tl.exp2(b_all) * b_c)[:, None]
    if far:
        b_dq, b_f, b_h, b_dg, b_rows = _far(
            b_dq, b_f, b_h, b_dg, b_q, b_e, b_k, b_l, b_end, b_end1, b_before, b_after, p_p, p_t,
            p_lk, p_ones, C, BK, K, PART, IO, PREC, SUM_PREC,
        )  # fmt: skip
    else:
        b_dq, b_f, b_h, b_dg, b_rows = _near(
            b_dq, b_f, b_h, b_dg, b_q, b_e, b_k, b_l, b_mid, b_mid1, b_end, b_end1, b_before,
            b_after, p_p, p_t, p_ones, C, BK, PART, IO, PREC, SUM_PREC,
        )  # fmt: skip
    b_self = tl.load(p_sums + tile * (2 * C) + o_i)[None, :]
    b_w = tl.load(p_ones + (C + o_i)[:, None] * C + o_i[None, :])
    b_dg = _step_sums(b_rows, b_w, b_dg, SUM_PREC)
    # A row and its own column: nothing decays between them.
    b_dq += b_self * b_k
    b_h += b_self * b_q

    # Chain rules and stores.
    b_raw = tl.load(p_g + (o_i * s_gt)[None, :] + o_c, mask=m_at, other=0.0).to(tl.float32)
    if p_bias is not None:
        b_raw += tl.load(p_bias + o_k).to(tl.float32)[:, None]
    if p_dbias is not None or p_dalog is not None:
        b_dg = tl.where(m_at, b_dg, 0.0)
    b_dx, b_da = gate_gradient(b_dg, b_raw, amp, lower, GATE)
    p_dg += token * s_dgt + i_h * s_dgh + (o_i * s_dgt)[None, :] + o_c
    tl.store(p_dg, b_dx.to(p_dg.dtype.element_ty), mask=m_at)
    if p_dbias is not None:
        tl.store(p_dbias, tl.sum(b_dx, axis=1))
    if p_dalog is not None:
        tl.store(p_dalog, tl.sum(b_da))
    p_dq += token * s_dqt + i_h * s_dqh + (o_i * s_dqt)[None, :] + o_c
    tl.store(p_dq, (scale * b_dq).to(p_dq.dtype.element_ty), mask=m_at)
    b_h -= b_b * b_f
    p_dk += token * s_dkt + i_h * s_dkh + (o_i * s_dkt)[None, :] + o_c
    tl.store(p_dk, b_h.to(p_dk.dtype.element_ty), mask=m_at)
    if ERASE_KEY:
        b_raw = tl.load(p_beta + s_bi[None, :] + o_c, mask=m_at, other=0.0).to(tl.float32)
        b_db = beta_gradient(-b_k * b_f, b_raw, SIGMOID, DOUBLE)
        p_dbeta += token * s_dbt + i_h * s_dbh + (o_i * s_dbt)[None, :] + o_c
        tl.store(p_dbeta, b_db.to(p_dbeta.dtype.element_ty), mask=m_at)
    else:
        tl.store(p_kf + (tile * NK + i_k) * C + o_i, tl.sum(b_k * b_f, axis=0))


@triton.jit(do_not_specialize=["N", "T"])
def beta_key_kernel(
    p_beta,
    p_sums,
    p_kf,
    p_dbeta,
    p_cu,
    N,
    T,
    s_cu,
    s_bt,
    s_bh,
    s_dbt,
    s_dbh,
    HO: tl.constexpr,
    C: tl.constexpr,
    NK: tl.constexpr,
    SIGMOID: tl.constexpr,
    DOUBLE: tl.constexpr,
):
    """db = Y . v - k . f of a chunk, for a strength a head: sums what the K-blocks left."""
    pid = tl.program_id(0).to(tl.int64)
    i_h = pid % HO
    _, i_c, begin, length = locate(pid // HO, p_cu, s_cu, N, T, C, 1)
    if i_c < 0:
        return
    o_i = tl.arange(0, C)
    m_t = i_c * C + o_i < length
    o_t = begin + i_c * C + o_i
    b_db = tl.load(p_sums + pid * (2 * C) + C + o_i)
    for i_k in tl.static_range(NK):
        b_db -= tl.load(p_kf + (pid * NK + i_k) * C + o_i)
    b_raw = tl.load(p_beta + o_t * s_bt + i_h * s_bh, mask=m_t, other=0.0).to(tl.float32)
    b_db = beta_gradient(b_db, b_raw, SIGMOID, DOUBLE)
    tl.store(p_dbeta + o_t * s_dbt + i_h * s_dbh, b_db.to(p_dbeta.dtype.element_ty), mask=m_t)
