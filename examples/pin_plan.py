"""List a graph's plans, pin one by name, and see a pin refused with its reason.

python examples/pin_plan.py
"""

from __future__ import annotations

import torch

import lagraph
from lagraph.ops import gated_delta_net

T, H, K, V = 96, 2, 32, 32


def main() -> None:
    """Plans of a graph, then plan_name of an operator."""
    torch.manual_seed(0)
    q, v = torch.randn(T, H, K), torch.randn(T, H, V)
    k = torch.nn.functional.normalize(torch.randn(T, H, K), dim=-1)
    g, beta = -torch.rand(T, H), torch.rand(T, H)
    offsets = torch.tensor([0, 40, T], dtype=torch.int32)

    graph = lagraph.Graph()
    O, _, _ = graph.gdn(q, k, v, g, beta, offsets)  # tensors may be given as they are
    O.set_output(True)
    graph.create_execution_plans()
    names = [graph.get_plan_name_at_index(i) for i in range(graph.get_execution_plan_count())]
    print("plans that serve the graph:", ", ".join(names))
    graph.select_plan("gdn_eager[chunk=32]")
    graph.build()
    out = torch.empty(T, H, V)
    graph.execute({O: out})
    print("ran", graph.plan_name)

    o, _ = gated_delta_net(q, k, v, g, beta, offsets, plan_name="gdn_eager[chunk=128]")
    print(f"another chunk size differs by {(o - out).abs().max():.1e}")

    for pin in ("gdn_eager[chunk=7]", "gdn_fast", "gdn_triton"):
        try:
            gated_delta_net(q, k, v, g, beta, offsets, plan_name=pin)
        except lagraph.PlanNotOffered as refusal:
            print(f"{pin} is refused: {refusal}")


if __name__ == "__main__":
    main()
