"""The recurrence token by token: a scan over sequences, and one token for a batch of them.

The state slice S [BV, BK] of one head is in fp32 registers. With k the key, e what is erased along
(k, or b . k where the erase strength has key channels) and a the decay, one update is

    S' = S diag(a)      u = beta (v - S' e)  or  w . v - S' e  or  dt v      S = S' + u k^T
    o  = scale S q = scale (S' q + (k . q) u)

so that the reductions S' e and S' q read the same tile and wait for nothing. Several updates a
token (NS) decay before the first of them and read after the last.

`recurrent_kernel`: one program per (sequence, head, V-slice), whose loop loads the next update's
rows while it works on this one. Small slices in one warp: no barrier, many programs.

`decode_kernel`: T tokens of each sequence, one as a rule, from packed post-convolution QKV, raw
gates and strengths: normalizes, activates, updates a pool row in place, or writes the state after
every token and leaves the pool, and writes the output. One program per (sequence, head, V-slice).
All but the state is asked for before the first wait, for the pool index; the token's factors are
found while the state is on its way. Traffic is the state, read and written once; a tile has BV BK
elements, 16 bytes a load. Of a 16-bit pool tiles are larger: there instructions are as many and
bytes half, so that what a program does once would count twice.

`accept_kernel`: of the states after every token, the one after the last accepted token becomes the
pool's row: a copy, 16 bytes a load.

Pool rows are dense [HO, V, K]; the stride between rows is free. A row number below PAD, or past the
pool, is padding: zero output, nothing read or written. Without the has flag a row is not read.
"""

# ruff: noqa: RUF005 (kernels have no unpacking)

import triton
import triton.language as tl

from lagraph.engines.triton.kernels.factor import NORM_EPS
from lagraph.engines.triton.kernels.gate import LOG2E, amplitude, log2_decay, sigmoid, step_size

__all__ = [
    "accept_kernel",
    "decode_gate_kernel",
    "decode_head_kernel",
    "decode_key_kernel",
    "recurrent_kernel",
]


@triton.jit
def _unit(b_x, NORM: tl.constexpr):
    if NORM:
        b_x *= tl.rsqrt(tl.sum(b_x * b_x) + NORM_EPS)
    return b_x


@triton.jit
def _strength(b_x, SIGMOID: tl.constexpr, DOUBLE: tl.constexpr):
    if SIGMOID:
        b_x = sigmoid(b_x)
        if DOUBLE:
            b_x = 2.0 * b_x
    return b_x


@triton.jit
def _spread(b_b, b_p, b_a0, b_c2):
    """Spread of a row of erase strengths, the largest that is safe, its mean's moments."""
    b_a1 = tl.sum(b_b * b_p)
    b_a2 = tl.sum(b_b * b_b * b_p)
    b_r = tl.maximum(b_a0 * b_a2 - b_a1 * b_a1, 0.0)
    b_d = 1.0 - b_a1
    b_lim = tl.maximum((b_c2 - 1.0) * (1.0 - b_d * b_d / b_c2), 0.0)
    return b_r, b_lim, b_a1, b_a0 * b_a2 + b_a1 * b_a1


@triton.jit
def _guard(b_b, b_k, b_g, m_k, IO: tl.constexpr):
    """GDN-2's beta_guard on one row [BK]; b_g are log2 decays."""
    b_p = b_k * b_k
    b_top = tl.max(tl.where(m_k, b_g, -float("inf")))
    b_c2 = tl.exp2(-2.0 * b_top)
    b_a0 = tl.sum(b_p)
    b_r, b_lim, b_a1, _ = _spread(b_b, b_p, b_a0, b_c2)
    act = (b_a0 > 1e-20) & (b_r > b_lim)
    b_mean = b_a1 / tl.maximum(b_a0, 1e-20)
    b_eta = tl.minimum(tl.sqrt((1.0 - 1.0 / 32.0) * b_lim / tl.maximum(b_r, 1e-30)), 1.0)
    b_new = b_mean + b_eta * (b_b - b_mean)
    if tl.float32 != IO:
        EPS4: tl.constexpr = 0.00390625 if tl.float16 == IO else 0.03125
        b_new = b_new.to(IO).to(tl.float32)
        b_r, b_lim, b_a1, b_size = _spread(b_new, b_p, b_a0, b_c2)
        b_new = tl.where(b_r > b_lim + EPS4 * b_size, b_a1 / tl.maximum(b_a0, 1e-20), b_new)
    return tl.where(act, b_new, b_b)


@triton.jit
def _log2_gate(b_x, amp, lower, b_bias, KIND: tl.constexpr):
    """log2 of the decay from a gate as it was passed, biased only where the kind has a bias."""
    return log2_decay(b_x + b_bias, amp, lower, KIND)


@triton.jit
def _update(
    b_s, b_q, b_k, b_v, b_a, b_beta, b_w, DELTA: tl.constexpr, KEY_GATE: tl.constexpr,
    ERASE_KEY: tl.constexpr,
):  # fmt: skip
    """The next state [BV, BK] and its reading S q [BV]. b_beta is dt without the delta rule."""
    b_s = b_s * (b_a[None, :] if KEY_GATE else b_a)
    b_o = tl.sum(b_s * b_q[None, :], axis=1)
    if DELTA:
        if ERASE_KEY:
            b_u = b_w * b_v - tl.sum(b_s * (b_beta * b_k)[None, :], axis=1)
        else:
            b_u = b_beta * (b_v - tl.sum(b_s * b_k[None, :], axis=1))
    else:
        b_u = b_beta * b_v
    b_o += tl.sum(b_k * b_q) * b_u
    return b_s + b_u[:, None] * b_k[None, :], b_o


@triton.jit
def _vector(p_x, o_x, m_x):
    return tl.load(p_x + o_x, mask=m_x, other=0.0).to(tl.float32)


@triton.jit
def _wide(b_x):
    """In fp32. Of bf16 by bits: an instruction an element, where the conversion takes one and a
    half."""
    if b_x.dtype == tl.bfloat16:
        b_w = b_x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
        b_w = b_w.to(tl.float32, bitcast=True)
    else:
        b_w = b_x.to(tl.float32)
    return b_w


@triton.jit
def _only(o_x, m, SIZE: tl.constexpr):
    """The elements, where the scalar m holds."""
    return o_x < tl.where(m, SIZE, 0)


@triton.jit
def _rows_of_step(
    p_q, p_k, p_v, p_g, p_beta, i_s, s_qt, s_kt, s_ks, s_vt, s_vs, s_gt, s_bt, s_bs, o_k, o_v,
    K: tl.constexpr, V: tl.constexpr, NS: tl.constexpr, KEY_GATE: tl.constexpr,
    ERASE_KEY: tl.constexpr, DELTA: tl.constexpr,
):  # fmt: skip
    """Loads of update i_s of a sequence: q, k [BK], v [BV], g and beta, scalar or [BK]."""
    i_t = i_s // NS
    i_u = i_s % NS
    m_k = o_k < K
    b_q = _vector(p_q, i_t * s_qt + o_k, m_k)
    b_k = _vector(p_k, i_t * s_kt + i_u * s_ks + o_k, m_k)
    b_v = _vector(p_v, i_t * s_vt + i_u * s_vs + o_v, o_v < V)
    if KEY_GATE:
        b_g = _vector(p_g, i_t * s_gt + o_k, m_k)
    else:
        b_g = tl.load(p_g + i_t * s_gt).to(tl.float32)
    if ERASE_KEY:
        b_b = _vector(p_beta, i_t * s_bt + i_u * s_bs + o_k, m_k)
    elif DELTA:
        b_b = tl.load(p_beta + i_t * s_bt + i_u * s_bs).to(tl.float32)
    else:
        b_b = b_g
    return b_q, b_k, b_v, b_g, b_b


@triton.jit(
    do_not_specialize=["T", "P"],
    do_not_specialize_on_alignment=["p_cu", "p_index", "p_has"],
)
def recurrent_kernel(
    p_q,
    p_k,
    p_v,
    p_g,
    p_beta,
    p_w,
    p_a,
    p_d,
    p_z,
    p_alog,
    p_bias,
    p_cu,
    p_h0,
    p_index,
    p_has,
    p_o,
    p_ht,
    p_states,
    T,
    P,
    scale,
    lower,
    dt_min,
    dt_max,
    s_cu,
    s_index,
    s_has,
    s_qb,
    s_qt,
    s_qh,
    s_kb,
    s_kt,
    s_ks,
    s_kh,
    s_vb,
    s_vt,
    s_vs,
    s_vh,
    s_gb,
    s_gt,
    s_gh,
    s_bb,
    s_bt,
    s_bs,
    s_bh,
    s_wb,
    s_wt,
    s_wh,
    s_zb,
    s_zt,
    s_zh,
    s_dh,
    s_dv,
    s_0n,
    s_fn,
    H: tl.constexpr,
    HK: tl.constexpr,
    HV: tl.constexpr,
    HO: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    NS: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PAD: tl.constexpr,
    GATE: tl.constexpr,
    KEY_GATE: tl.constexpr,
    DELTA: tl.constexpr,
    ERASE_KEY: tl.constexpr,
    NORM: tl.constexpr,
    SIGMOID: tl.constexpr,
    DOUBLE: tl.constexpr,
    GUARD: tl.constexpr,
    SOFTPLUS: tl.constexpr,
):
    NV: tl.constexpr = (V + BV - 1) // BV
    IO: tl.constexpr = p_k.dtype.element_ty
    pid = tl.program_id(0).to(tl.int64)
    i_h = (pid // NV) % HO
    i_n = pid // (NV * HO)
    o_k = tl.arange(0, BK)
    o_v = (pid % NV).to(tl.int32) * BV + tl.arange(0, BV)
    m_k = o_k < K
    m_v = o_v < V
    if p_cu is None:
        i_b = i_n
        begin = i_n * 0
        length = begin + T
    else:
        i_b = i_n * 0
        begin = tl.minimum(tl.maximum(tl.load(p_cu + i_n * s_cu).to(tl.int64), 0), T)
        end = tl.minimum(tl.load(p_cu + (i_n + 1) * s_cu).to(tl.int64), T)
        length = tl.maximum(end, begin) - begin
    row = i_b * T + begin  # of the dense outputs [rows, HO, ...]
    p_o += (row * HO + i_h) * V + o_v

    i_s = i_n
    if p_index is not None:
        i_s = tl.load(p_index + i_n * s_index).to(tl.int64)
        if (i_s < PAD) | (i_s >= P):
            for i_t in range(0, length):
                tl.store(p_o + i_t * (HO * V), tl.zeros([BV], p_o.dtype.element_ty), mask=m_v)
            return

    o_tile = o_v[:, None] * K + o_k[None, :]
    m_tile = m_v[:, None] & m_k[None, :]
    b_s = tl.zeros([BV, BK], tl.float32)
    if p_h0 is not None:
        m_0 = m_tile
        if p_has is not None:
            has = tl.load(p_has + i_n * s_has) != 0
            m_0 = _only(o_v, has, V)[:, None] & m_k[None, :]
        b_s = tl.load(p_h0 + i_s * s_0n + i_h * (V * K) + o_tile, mask=m_0, other=0.0)
        b_s = b_s.to(tl.float32)

    p_q += i_b * s_qb + begin * s_qt + i_h // (HO // H) * s_qh
    p_k += i_b * s_kb + begin * s_kt + i_h // (HO // HK) * s_kh
    p_v += i_b * s_vb + begin * s_vt + i_h // (HO // HV) * s_vh
    p_g += i_b * s_gb + begin * s_gt + i_h * s_gh
    if DELTA:
        p_beta += i_b * s_bb + begin * s_bt + i_h * s_bh
    if p_w is not None:
        p_w += i_b * s_wb + begin * s_wt + i_h * s_wh + o_v
    if p_z is not None:
        p_z += i_b * s_zb + begin * s_zt + i_h * s_zh + o_v
    if p_states is not None:
        p_states += (row * HO + i_h) * (V * K) + o_tile
    amp = amplitude(p_alog, i_h)
    if p_bias is None:
        b_bias = 0.0
    elif KEY_GATE:
        b_bias = _vector(p_bias, i_h * K + o_k, m_k)
    else:
        b_bias = tl.load(p_bias + i_h).to(tl.float32)
    if not DELTA:
        b_rate = tl.load(p_a + i_h).to(tl.float32)
    if p_d is not None:
        b_d = _vector(p_d, i_h * s_dh + o_v * s_dv, m_v)

    steps = length * NS
    if steps > 0:
        n_q, n_k, n_v, n_g, n_b = _rows_of_step(
            p_q, p_k, p_v, p_g, p_beta, begin * 0, s_qt, s_kt, s_ks, s_vt, s_vs, s_gt, s_bt, s_bs,
            o_k, o_v, K, V, NS, KEY_GATE, ERASE_KEY, DELTA,
        )  # fmt: skip
        for i_u in range(0, steps):
            b_q, b_k, b_v, b_g, b_b = n_q, n_k, n_v, n_g, n_b
            n_q, n_k, n_v, n_g, n_b = _rows_of_step(
                p_q, p_k, p_v, p_g, p_beta, tl.minimum(begin * 0 + i_u + 1, steps - 1),
                s_qt, s_kt, s_ks, s_vt, s_vs, s_gt, s_bt, s_bs,
                o_k, o_v, K, V, NS, KEY_GATE, ERASE_KEY, DELTA,
            )  # fmt: skip
            i_t = i_u // NS
            b_q = _unit(b_q, NORM) * scale
            b_k = _unit(b_k, NORM)
            b_w = b_v
            if p_w is not None:
                b_w = tl.load(p_w + i_t * s_wt, mask=m_v, other=0.0).to(tl.float32)
            if GATE == "ssd":
                b_b = step_size(b_g + b_bias, dt_min, dt_max, SOFTPLUS)
                b_g = b_rate * b_b * LOG2E
            else:
                b_g = _log2_gate(b_g, amp, lower, b_bias, GATE)
                b_b = _strength(b_b, SIGMOID, DOUBLE)
            if GUARD:
                b_b = _guard(b_b, b_k, b_g, m_k, IO)
            if NS > 1:
                b_g = tl.where(i_u % NS == 0, b_g, 0.0)
            b_s, b_o = _update(b_s, b_q, b_k, b_v, tl.exp2(b_g), b_b, b_w, DELTA, KEY_GATE,
                               ERASE_KEY)  # fmt: skip
            if p_d is not None:
                b_o += b_d * b_v
            if p_z is not None:
                b_z = tl.load(p_z + i_t * s_zt, mask=m_v, other=0.0).to(tl.float32)
                b_o *= b_z * sigmoid(b_z)
            if i_u % NS == NS - 1:
                tl.store(p_o + i_t * (HO * V), b_o.to(p_o.dtype.element_ty), mask=m_v)
                if p_states is not None:
                    p_tile = p_states + i_t * (HO * V * K)
                    tl.store(p_tile, b_s.to(p_states.dtype.element_ty), mask=m_tile)

    if p_ht is not None:
        p_tile = p_ht + i_s * s_fn + i_h * (V * K) + o_tile
        tl.store(p_tile, b_s.to(p_ht.dtype.element_ty), mask=m_tile)


@triton.jit
def _updates(
    b_s, b_q, b_ks, b_vs, b_bs, b_w, b_kq, b_ke, DELTA: tl.constexpr, ERASE_KEY: tl.constexpr,
    NS: tl.constexpr,
):  # fmt: skip
    """The state [BV, BK] after NS updates without decay, and its reading S q [BV].

    Every reduction over the tile reads the state before the first update: what update j adds to
    what a later one erases along e is (k_j . e) u_j.
    """
    b_o = tl.sum(b_s * b_q[None, :], axis=1)
    b_us = ()
    for i in tl.static_range(NS):
        if DELTA:
            b_e = b_bs[i] if ERASE_KEY else b_ks[i]
            b_r = tl.sum(b_s * b_e[None, :], axis=1)
            for j in tl.static_range(i):
                b_r += b_ke[i * (i - 1) // 2 + j] * b_us[j]
            b_u = b_w * b_vs[i] - b_r if ERASE_KEY else b_bs[i] * (b_vs[i] - b_r)
        else:
            b_u = b_bs[i] * b_vs[i]
        b_us = b_us + (b_u,)
    for i in tl.static_range(NS):
        b_o += b_kq[i] * b_us[i]
        b_s += b_us[i][:, None] * b_ks[i][None, :]
    return b_s, b_o


@triton.jit
def _keys(
    p_q, p_k, p_g, p_beta, m, s_bs, o_k, HK: tl.constexpr, K: tl.constexpr, NS: tl.constexpr,
    KEY_GATE: tl.constexpr, ERASE_KEY: tl.constexpr, DELTA: tl.constexpr,
):  # fmt: skip
    """A token's loads that no row of the state has to itself, as they are stored: q, keys,
    strengths (gates where there are none), gate."""
    m_k = _only(o_k, m, K)
    b_q = tl.load(p_q + o_k, mask=m_k, other=0.0)
    b_g = tl.load(p_g + o_k, mask=m_k, other=0.0) if KEY_GATE else tl.load(p_g, mask=m, other=0.0)
    b_ks = ()
    b_bs = ()
    for i in tl.static_range(NS):
        b_ks = b_ks + (tl.load(p_k + i * (HK * K) + o_k, mask=m_k, other=0.0),)
        if ERASE_KEY:
            b_b = tl.load(p_beta + i * s_bs + o_k, mask=m_k, other=0.0)
        elif DELTA:
            b_b = tl.load(p_beta + i * s_bs, mask=m, other=0.0)
        else:
            b_b = b_g
        b_bs = b_bs + (b_b,)
    return b_q, b_ks, b_bs, b_g


@triton.jit
def _values(p_v, p_w, p_z, m, o_v, HO: tl.constexpr, V: tl.constexpr, NS: tl.constexpr):
    """A token's loads for the rows of the state, as they are stored: values, w and z."""
    m_v = _only(o_v, m, V)
    b_vs = ()
    for i in tl.static_range(NS):
        b_vs = b_vs + (tl.load(p_v + i * (HO * V) + o_v, mask=m_v, other=0.0),)
    b_w = b_vs[0]
    if p_w is not None:
        b_w = tl.load(p_w + o_v, mask=m_v, other=0.0)
    b_z = b_vs[0]
    if p_z is not None:
        b_z = tl.load(p_z + o_v, mask=m_v, other=0.0)
    return b_vs, b_w, b_z


@triton.jit
def _floats(b_vs, b_w, b_z, NS: tl.constexpr):
    """What `_values` loaded, in fp32."""
    b_xs = ()
    for i in tl.static_range(NS):
        b_xs = b_xs + (b_vs[i].to(tl.float32),)
    return b_xs, b_w.to(tl.float32), b_z.to(tl.float32)


@triton.jit
def _factors(
    b_q, b_ks, b_bs, b_g, amp, lower, b_bias, b_rate, scale, dt_min, dt_max, m_k,
    IO: tl.constexpr, NS: tl.constexpr, GATE: tl.constexpr, DELTA: tl.constexpr,
    ERASE_KEY: tl.constexpr, NORM: tl.constexpr, SIGMOID: tl.constexpr, DOUBLE: tl.constexpr,
    GUARD: tl.constexpr, SOFTPLUS: tl.constexpr,
):  # fmt: skip
    """What a token does to a state, whatever is in it: q, keys, strengths (what is erased, where
    they have key channels), the decay, and the products of keys with q and of earlier keys with
    what is erased."""
    b_q = _unit(b_q.to(tl.float32), NORM) * scale
    b_g = b_g.to(tl.float32)
    if GATE == "ssd":
        b_dt = step_size(b_g + b_bias, dt_min, dt_max, SOFTPLUS)
        b_g = b_rate * b_dt * LOG2E
    else:
        b_g = _log2_gate(b_g, amp, lower, b_bias, GATE)
    b_kn = ()
    b_bn = ()
    b_kq = ()
    b_ke = ()
    for i in tl.static_range(NS):
        b_k = _unit(b_ks[i].to(tl.float32), NORM)
        b_b = _strength(b_bs[i].to(tl.float32), SIGMOID, DOUBLE) if DELTA else b_dt
        if GUARD:
            b_b = _guard(b_b, b_k, b_g, m_k, IO)
        if ERASE_KEY:
            b_b = b_b * b_k
        b_kq = b_kq + (tl.sum(b_k * b_q),)
        if DELTA:
            b_e = b_b if ERASE_KEY else b_k
            for j in tl.static_range(i):
                b_ke = b_ke + (tl.sum(b_kn[j] * b_e),)
        b_kn = b_kn + (b_k,)
        b_bn = b_bn + (b_b,)
    return b_q, b_kn, b_bn, tl.exp2(b_g), b_kq, b_ke


@triton.jit
def _nothing(
    scale, BK: tl.constexpr, NS: tl.constexpr, KEY_GATE: tl.constexpr, ERASE_KEY: tl.constexpr,
    DELTA: tl.constexpr,
):  # fmt: skip
    """As many values as `_factors` returns, of the same shapes; what they are is no matter."""
    b_x = tl.zeros([BK], tl.float32)
    b_ks = ()
    b_bs = ()
    b_kq = ()
    b_ke = ()
    for i in tl.static_range(NS):
        b_ks = b_ks + (b_x,)
        b_bs = b_bs + (b_x if ERASE_KEY else scale,)
        b_kq = b_kq + (scale,)
        for _ in tl.static_range(i if DELTA else 0):
            b_ke = b_ke + (scale,)
    return b_x, b_ks, b_bs, b_x if KEY_GATE else scale, b_kq, b_ke


def decode_kernel(
    p_x,
    p_g,
    p_beta,
    p_w,
    p_a,
    p_d,
    p_z,
    p_alog,
    p_bias,
    p_s,
    p_index,
    p_has,
    p_o,
    p_states,
    P,
    T,
    keep,
    scale,
    lower,
    dt_min,
    dt_max,
    s_xn,
    s_xt,
    s_gn,
    s_gt,
    s_gh,
    s_bn,
    s_bt,
    s_bs,
    s_bh,
    s_wn,
    s_wt,
    s_wh,
    s_zn,
    s_zt,
    s_zh,
    s_dh,
    s_dv,
    s_sn,
    s_index,
    s_has,
    HK: tl.constexpr,
    HO: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    NS: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    UNIT: tl.constexpr,
    PAD: tl.constexpr,
    GATE: tl.constexpr,
    KEY_GATE: tl.constexpr,
    DELTA: tl.constexpr,
    ERASE_KEY: tl.constexpr,
    NORM: tl.constexpr,
    SIGMOID: tl.constexpr,
    DOUBLE: tl.constexpr,
    GUARD: tl.constexpr,
    SOFTPLUS: tl.constexpr,
):
    NV: tl.constexpr = (V + BV - 1) // BV
    IO: tl.constexpr = p_x.dtype.element_ty
    # Sections of a packed row: Q | K | V, or x | B | C.
    AT_Q: tl.constexpr = 0 if DELTA else HO * V + HK * K
    AT_K: tl.constexpr = HK * K if DELTA else HO * V
    AT_V: tl.constexpr = (1 + NS) * HK * K if DELTA else 0
    pid = tl.program_id(0)
    # Products of 32 bits that are as wide as an address: one instruction.
    i_n = (pid // (NV * HO)).to(tl.int64)
    i_s = tl.load(p_index + i_n * s_index)
    i_h = (pid // NV % HO).to(tl.int64)
    i_k = i_h // (HO // HK)
    o_k = tl.arange(0, BK)
    o_v = pid % NV * BV + tl.arange(0, BV)
    m_k = o_k < K
    m_v = o_v < V
    # Strides of vectors are counted in UNIT elements, which tells how they are aligned.
    U_G: tl.constexpr = UNIT if KEY_GATE else 1
    U_B: tl.constexpr = UNIT if ERASE_KEY else 1
    p_x += i_n * (s_xn * UNIT)
    p_q = p_x + (AT_Q + i_k * K)
    p_k = p_x + (AT_K + i_k * K)
    p_v = p_x + (AT_V + i_h * V)
    p_g += i_n * (s_gn * U_G) + i_h * (s_gh * U_G)
    if DELTA:
        p_beta += i_n * (s_bn * U_B) + i_h * (s_bh * U_B)
    if p_w is not None:
        p_w += i_n * (s_wn * UNIT) + i_h * (s_wh * UNIT)
    if p_z is not None:
        p_z += i_n * (s_zn * UNIT) + i_h * (s_zh * UNIT)

    # Everything but the state, as it is stored, while its row number is on the way.
    n_q, n_ks, n_bs, n_g = _keys(
        p_q, p_k, p_g, p_beta, T > 0, s_bs * U_B, o_k, HK, K, NS, KEY_GATE, ERASE_KEY, DELTA
    )
    b_vs, b_w, b_z = _values(p_v, p_w, p_z, T > 0, o_v, HO, V, NS)
    if p_alog is not None:
        b_log = tl.load(p_alog + i_h)
    if p_bias is None:
        b_bias = tl.zeros([], tl.float32)
    elif KEY_GATE:
        b_bias = tl.load(p_bias + i_h * K + o_k, mask=m_k, other=0.0)
    else:
        b_bias = tl.load(p_bias + i_h)
    b_rate = scale
    if not DELTA:
        b_rate = tl.load(p_a + i_h)
    if p_d is not None:
        b_d = tl.load(p_d + i_h * s_dh + o_v * s_dv, mask=m_v, other=0.0)
    if p_has is not None:
        has = tl.load(p_has + i_n * s_has) != 0
    row = i_n * T * HO + i_h
    # A branch, so that no load above comes after the wait for the row number: within a block the
    # assembler puts them where it likes.
    if (i_s < PAD) | (i_s >= P):
        for _ in range(0, T):
            tl.store(p_o + row * V + o_v, tl.zeros([BV], p_o.dtype.element_ty), mask=m_v)
            row += HO
        return

    o_tile = o_v[:, None] * K + o_k[None, :]
    p_s += i_s.to(tl.int64) * (s_sn * UNIT) + i_h * (V * K)
    m_tile = m_v[:, None] & m_k[None, :]
    m_0 = m_tile
    if p_has is not None:
        m_0 = _only(o_v, has, V)[:, None] & m_k[None, :]
    b_s = _wide(tl.load(p_s + o_tile, mask=m_0, other=0.0))
    b_vs, b_w, b_z = _floats(b_vs, b_w, b_z, NS)
    b_bias, b_rate = b_bias.to(tl.float32), b_rate.to(tl.float32)
    if p_alog is not None:
        b_log = b_log.to(tl.float32)
    if p_d is not None:
        b_d = b_d.to(tl.float32)
    # While the state is on the way: a block of its own, which nothing that waits for it enters.
    amp = tl.full([], 1.0, tl.float32)
    if T > 0:
        if p_alog is not None:
            amp = tl.minimum(tl.exp2(b_log * LOG2E), 3e38)  # as `amplitude` of gate.py
        b_q, b_ks, b_bs, b_a, b_kq, b_ke = _factors(
            n_q, n_ks, n_bs, n_g, amp, lower, b_bias, b_rate, scale, dt_min, dt_max, m_k, IO, NS,
            GATE, DELTA, ERASE_KEY, NORM, SIGMOID, DOUBLE, GUARD, SOFTPLUS,
        )  # fmt: skip
    else:
        b_q, b_ks, b_bs, b_a, b_kq, b_ke = _nothing(scale, BK, NS, KEY_GATE, ERASE_KEY, DELTA)

    for i_t in range(0, T):
        # The token's decay belongs to its first update.
        b_s = b_s * (b_a[None, :] if KEY_GATE else b_a)
        b_s, b_o = _updates(b_s, b_q, b_ks, b_vs, b_bs, b_w, b_kq, b_ke, DELTA, ERASE_KEY, NS)
        if p_d is not None:
            b_o += b_d * b_vs[0]
        if p_z is not None:
            b_o *= b_z * sigmoid(b_z)
        tl.store(p_o + row * V + o_v, b_o.to(p_o.dtype.element_ty), mask=m_v)
        if keep != 0:
            p_tile = p_states + row * (V * K) + o_tile
            tl.store(p_tile, b_s.to(p_states.dtype.element_ty), mask=m_tile)

        # Not before the stores: a second set of rows in registers would cost more than it hides.
        i_u = i_t + 1
        if i_u < T:
            row += HO
            at = i_u * s_xt.to(tl.int64) * UNIT
            q_g = p_g + i_u * s_gt.to(tl.int64) * U_G
            q_b, q_w, q_z = p_beta, p_w, p_z
            if DELTA:
                q_b = p_beta + i_u * s_bt.to(tl.int64) * U_B
            if p_w is not None:
                q_w = p_w + i_u * s_wt.to(tl.int64) * UNIT
            if p_z is not None:
                q_z = p_z + i_u * s_zt.to(tl.int64) * UNIT
            n_q, n_ks, n_bs, n_g = _keys(
                p_q + at, p_k + at, q_g, q_b, True, s_bs * U_B, o_k, HK, K, NS, KEY_GATE,
                ERASE_KEY, DELTA,
            )  # fmt: skip
            b_vs, b_w, b_z = _values(p_v + at, q_w, q_z, True, o_v, HO, V, NS)
            b_vs, b_w, b_z = _floats(b_vs, b_w, b_z, NS)
            b_q, b_ks, b_bs, b_a, b_kq, b_ke = _factors(
                n_q, n_ks, n_bs, n_g, amp, lower, b_bias, b_rate, scale, dt_min, dt_max, m_k, IO,
                NS, GATE, DELTA, ERASE_KEY, NORM, SIGMOID, DOUBLE, GUARD, SOFTPLUS,
            )  # fmt: skip

    if keep == 0:
        tl.store(p_s + o_tile, b_s.to(p_s.dtype.element_ty), mask=m_tile)


def _decode(scalars):
    """The kernel where these arguments are scalars, whose alignment is no matter.

    Strides, T and `keep` choose no binary: one token and several of them, a pool that is advanced
    and one that is only read have the same bits, because the same instructions run.
    """
    sizes = ["P", "T", "keep", "s_sn", "s_index", "s_has", "s_xn", "s_xt", "s_bs"]
    sizes += [f"s_{x}{axis}" for x in "gbwz" for axis in "nth"]
    return triton.jit(
        do_not_specialize=sizes, do_not_specialize_on_alignment=["p_index", "p_has", *scalars]
    )(decode_kernel)


# Gate and strength a head; a gate a key channel; both a key channel.
decode_head_kernel = _decode(("p_g", "p_beta"))
decode_gate_kernel = _decode(("p_beta",))
decode_key_kernel = _decode(())


@triton.jit(
    do_not_specialize=["P", "T", "s_index", "s_count", "s_cu"],
    do_not_specialize_on_alignment=["p_index", "p_count", "p_cu"],
)
def accept_kernel(
    p_pool,
    p_index,
    p_states,
    p_count,
    p_cu,
    P,
    T,
    s_pool,
    s_index,
    s_count,
    s_cu,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PAD: tl.constexpr,
):
    """One program per (sequence, BLOCK elements of a row of SIZE)."""
    NB: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    pid = tl.program_id(0).to(tl.int64)
    i_n = pid // NB
    i_s = tl.load(p_index + i_n * s_index).to(tl.int64)
    count = tl.load(p_count + i_n * s_count).to(tl.int64)
    if p_cu is None:
        begin = i_n * T
        length = tl.zeros([], tl.int64) + T
    else:
        begin = tl.minimum(tl.maximum(tl.load(p_cu + i_n * s_cu).to(tl.int64), 0), T)
        length = tl.minimum(tl.load(p_cu + (i_n + 1) * s_cu).to(tl.int64), T) - begin
    count = tl.minimum(count, length)
    live = (i_s >= PAD) & (i_s < P) & (count > 0)
    row = tl.where(live, begin + count - 1, 0)
    o_x = (pid % NB).to(tl.int32) * BLOCK + tl.arange(0, BLOCK)
    m_x = _only(o_x, live, SIZE)
    b_x = tl.load(p_states + row * SIZE + o_x, mask=m_x, other=0.0)
    p_pool += tl.where(live, i_s, 0) * s_pool
    tl.store(p_pool + o_x, b_x.to(p_pool.dtype.element_ty), mask=m_x)
