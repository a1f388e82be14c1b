"""The operator example of cuDNN's linear-attention page, with one line changed: the import.

python examples/mirror_ops.py
"""

from __future__ import annotations

import torch

from lagraph.ops import gated_delta_net, mamba2  # from cudnn.linear_attention.ops import ...

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def main() -> None:
    """A ragged GDN call with its backward, and a Mamba-2 call."""
    T, H, K, V = 4096, 16, 128, 128
    io = {"dtype": torch.bfloat16, "device": DEVICE}
    cu_seqlens = torch.tensor([0, 1000, 2500, T], dtype=torch.int32, device=DEVICE)
    q = torch.randn(T, H, K, requires_grad=True, **io)
    k = torch.randn(T, H, K, requires_grad=True, **io)
    v = torch.randn(T, H, V, requires_grad=True, **io)
    g = -torch.nn.functional.softplus(torch.randn(T, H, device=DEVICE))
    beta = torch.sigmoid(torch.randn(T, H, device=DEVICE))

    o, final_state = gated_delta_net(
        q, k, v, g, beta, cu_seqlens, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    o.sum().backward()
    print("gated_delta_net", list(o.shape), o.dtype, list(final_state.shape), final_state.dtype)
    print("gradient of q: norm", round(q.grad.float().norm().item(), 2))

    P, N, G = 64, 128, 2
    x = torch.randn(T, H, P, **io)
    dt = torch.randn(T, H, device=DEVICE)
    A = -torch.exp(torch.randn(H, device=DEVICE))
    B = torch.randn(T, G, N, **io)
    C = torch.randn(T, G, N, **io)
    y, final_state = mamba2(
        x, dt, A, B, C, cu_seqlens, D=torch.ones(H, device=DEVICE), output_final_state=True
    )
    print("mamba2", list(y.shape), y.dtype, list(final_state.shape), final_state.dtype)


if __name__ == "__main__":
    main()
