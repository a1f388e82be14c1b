"""Declare a graph with T and N open, ask what serves it, build it once, run it on any length.

python examples/graph_gdn.py
"""

from __future__ import annotations

import torch

import lagraph

H, K, V = 4, 64, 64


def batch(lengths: list[int]) -> dict[str, torch.Tensor]:
    """A packed ragged batch: sequences one after the other along T."""
    T = sum(lengths)
    offsets = torch.tensor([0, *lengths]).cumsum(0).int()
    return {
        "q": torch.randn(T, H, K),
        "k": torch.nn.functional.normalize(torch.randn(T, H, K), dim=-1),
        "v": torch.randn(T, H, V),
        "g": -0.1 * torch.rand(T, H),  # natural log of the decay
        "beta": torch.rand(T, H),
        "cu_seqlens": offsets,
    }


def main() -> None:
    """Build once, run twice."""
    torch.manual_seed(0)
    graph = lagraph.Graph("gdn", io_data_type=lagraph.data_type.FLOAT, device="cpu")
    dims = {"q": [None, H, K], "k": [None, H, K], "v": [None, H, V], "g": [None, H],
            "beta": [None, H]}  # fmt: skip
    ports = {name: graph.tensor(dim, name=name) for name, dim in dims.items()}
    ports["cu_seqlens"] = graph.tensor([None], name="cu_seqlens", data_type=torch.int32)
    O, final_state, _ = graph.gdn(**ports, output_final_state=True)
    O.set_output(True).set_name("O")
    final_state.set_output(True).set_name("final_state")

    print(graph.explain())
    graph.build([lagraph.heur_mode.A])

    for lengths in ([100, 0, 28], [17]):
        tensors = batch(lengths)
        T, N = len(tensors["q"]), len(lengths)
        outputs = {"O": torch.empty(T, H, V), "final_state": torch.empty(N, H, V, K)}
        graph.execute(tensors | outputs)
        norms = outputs["final_state"].flatten(1).norm(dim=1).tolist()
        print(f"lengths {lengths}: O {list(outputs['O'].shape)}, norms of the final states "
              f"{[round(norm, 2) for norm in norms]}")  # fmt: skip

    again = lagraph.Graph().deserialize(graph.serialize())
    print(f"serialized and back: the same graph {again.key() == graph.key()}, "
          f"plan {again.plan_name}")  # fmt: skip


if __name__ == "__main__":
    main()
