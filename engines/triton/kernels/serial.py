"""Both serial passes of the backward in one launch: neither needs what the other makes.

The programs of `states` come first, then those of `reverse`. Each pass alone waits on memory, and
few sequences leave SMs idle: side by side they take little longer than the longer of the two. Where
a wide state leaves no registers for both, PASS is one of them, "states" or "reverse".
"""

import triton
import triton.language as tl

from lagraph.engines.triton.kernels.reverse import retreat
from lagraph.engines.triton.kernels.states import advance

__all__ = ["serial_kernel"]


@triton.jit(do_not_specialize=["N", "T"])
def serial_kernel(
    p_k,
    p_e,
    p_v,
    p_w,
    p_beta,
    p_rows,
    p_decay,
    p_t,
    p_h0,
    p_check,
    p_s,
    p_u,
    p_cu,
    p_q,
    p_p,
    p_do,
    p_z,
    p_dht,
    p_ds,
    p_y,
    p_d,
    p_dv,
    p_dh0,
    N,
    T,
    s_cu,
    s_kt,
    s_ks,
    s_kh,
    s_vt,
    s_vs,
    s_vh,
    s_wt,
    s_wh,
    s_bt,
    s_bh,
    s_in,
    s_ih,
    s_iv,
    s_qt,
    s_qh,
    s_ot,
    s_oh,
    s_zt,
    s_zh,
    s_fn,
    s_fh,
    s_fv,
    s_0n,
    s_0h,
    s_0v,
    s_dh,
    s_dv,
    s_dvt,
    s_dvh,
    HK: tl.constexpr,
    HV: tl.constexpr,
    HO: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    NS: tl.constexpr,
    C: tl.constexpr,
    BV: tl.constexpr,
    KEY_GATE: tl.constexpr,
    DELTA: tl.constexpr,
    ERASE_KEY: tl.constexpr,
    SIGMOID: tl.constexpr,
    DOUBLE: tl.constexpr,
    EVERY: tl.constexpr,
    SPLIT: tl.constexpr,
    PREC: tl.constexpr,
    H: tl.constexpr,
    CQ: tl.constexpr,
    PASS: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    if PASS == "states":
        advance(
            pid, p_k, p_e, p_v, p_w, p_beta, p_rows, p_decay, p_t, p_h0, p_check, p_s, p_u, p_cu,
            N, T, s_cu, s_kt, s_ks, s_kh, s_vt, s_vs, s_vh, s_wt, s_wh, s_bt, s_bh, s_in, s_ih,
            s_iv, HK, HV, HO, K, V, NS, C, BV, KEY_GATE, DELTA, ERASE_KEY, SIGMOID, DOUBLE, EVERY,
            SPLIT, PREC,
        )  # fmt: skip
    elif PASS == "reverse":
        retreat(
            pid, p_q, p_k, p_e, p_beta, p_rows, p_decay, p_t, p_p, p_do, p_z, p_dht, p_ds, p_y,
            p_d, p_dv, p_dh0, p_cu, T, s_cu, s_qt, s_qh, s_kt, s_ks, s_kh, s_bt, s_bh, s_ot, s_oh,
            s_zt, s_zh, s_fn, s_fh, s_fv, s_0n, s_0h, s_0v, s_dh, s_dv, s_dvt, s_dvh, H, HK, HO, K,
            V, NS, C, CQ, BV, KEY_GATE, DELTA, ERASE_KEY, False, SIGMOID, DOUBLE, SPLIT, PREC,
        )  # fmt: skip
    else:
        count = tl.zeros([], tl.int64) + N
        if p_check is not None:
            count += T * NS // EVERY
        count *= HO * (V // BV)
        if pid < count:
            advance(
                pid, p_k, p_e, p_v, p_w, p_beta, p_rows, p_decay, p_t, p_h0, p_check, p_s, p_u,
                p_cu, N, T, s_cu, s_kt, s_ks, s_kh, s_vt, s_vs, s_vh, s_wt, s_wh, s_bt, s_bh, s_in,
                s_ih, s_iv, HK, HV, HO, K, V, NS, C, BV, KEY_GATE, DELTA, ERASE_KEY, SIGMOID,
                DOUBLE, EVERY, SPLIT, PREC,
            )  # fmt: skip
        else:
            retreat(
                pid - count, p_q, p_k, p_e, p_beta, p_rows, p_decay, p_t, p_p, p_do, p_z, p_dht,
                p_ds, p_y, p_d, p_dv, p_dh0, p_cu, T, s_cu, s_qt, s_qh, s_kt, s_ks, s_kh, s_bt,
                s_bh, s_ot, s_oh, s_zt, s_zh, s_fn, s_fh, s_fv, s_0n, s_0h, s_0v, s_dh, s_dv,
                s_dvt, s_dvh, H, HK, HO, K, V, NS, C, CQ, BV, KEY_GATE, DELTA, ERASE_KEY, False,
                SIGMOID, DOUBLE, SPLIT, PREC,
            )  # fmt: skip
