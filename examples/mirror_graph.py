"""A program for cuDNN's Python graph API that runs here with one line changed: the import.

python examples/mirror_graph.py
"""

from __future__ import annotations

import torch

import lagraph as cudnn  # import cudnn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def main() -> None:
    """GDN forward over a ragged batch, with every step of the graph's life spelled out."""
    T, H, HV, K, V, N = 512, 2, 4, 128, 128, 3
    graph = cudnn.pygraph(
        name="gdn_forward",
        io_data_type=cudnn.data_type.BFLOAT16,
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
    )

    def token(name: str, heads: int, dim: int) -> object:
        return graph.tensor(
            dim=[T, heads, dim], stride=[heads * dim, dim, 1],
            data_type=cudnn.data_type.BFLOAT16, name=name,
        )  # fmt: skip

    q, k, v = token("q", H, K), token("k", H, K), token("v", HV, V)
    g = graph.tensor(dim=[T, HV], stride=[HV, 1], data_type=cudnn.data_type.FLOAT, name="g")
    beta = graph.tensor(dim=[T, HV], stride=[HV, 1], data_type=cudnn.data_type.FLOAT, name="beta")
    cu_seqlens = graph.tensor(dim=[N + 1], stride=[1], data_type=cudnn.data_type.INT32, name="cu")
    O, final_state, state_checkpoints = graph.gdn(
        q=q, k=k, v=v, g=g, beta=beta, cu_seqlens=cu_seqlens,
        output_final_state=True, use_qk_l2norm=True, checkpoint_every_n_tokens=64, name="gdn",
    )  # fmt: skip
    O.set_output(True).set_data_type(cudnn.data_type.BFLOAT16)
    final_state.set_output(True).set_data_type(cudnn.data_type.FLOAT)
    state_checkpoints.set_output(True).set_data_type(cudnn.data_type.BFLOAT16)

    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A])
    graph.check_support()
    graph.build_plans()
    print("plan", graph.get_plan_name_at_index(0))

    io = {"dtype": torch.bfloat16, "device": DEVICE}
    offsets = torch.tensor([0, 100, 300, T], dtype=torch.int32, device=DEVICE)
    o = torch.empty(T, HV, V, **io)
    s = torch.empty(N, HV, V, K, dtype=torch.float32, device=DEVICE)
    rows = torch.empty(T // 64 + N, HV, V, K, **io)
    variant_pack = {
        q: torch.randn(T, H, K, **io),
        k: torch.randn(T, H, K, **io),
        v: torch.randn(T, HV, V, **io),
        g: -torch.nn.functional.softplus(torch.randn(T, HV, device=DEVICE)),
        beta: torch.sigmoid(torch.randn(T, HV, device=DEVICE)),
        cu_seqlens: offsets,
        O: o,
        final_state: s,
        state_checkpoints: rows,
    }
    workspace = torch.empty(max(graph.get_workspace_size(), 1), dtype=torch.uint8, device=DEVICE)
    handle = cudnn.create_handle()
    graph.execute(variant_pack, workspace, handle=handle)
    cudnn.destroy_handle(handle)
    print("O", list(o.shape), "norm", round(o.float().norm().item(), 2))
    print("final_state", list(s.shape), "norm", round(s.norm().item(), 2))


if __name__ == "__main__":
    main()
