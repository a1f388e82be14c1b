"""Tensors and calls made from the declarations alone: every node, every port, small sizes.

Head counts, K, V and T all differ, so that a mixed-up dimension cannot pass unseen.
"""

from __future__ import annotations

import torch

import lagraph
from lagraph import registry
from lagraph.infer import checkpoint_rows, dim_of

SIZES = {"T": 6, "N": 2, "P": 5, "H": 2, "HK": 2, "HV": 4, "HO": 4, "K": 3, "V": 8, "n": 2}
OFFSETS, SLOTS = [0, 2, 6], [3, 0]
NODES = list(registry.nodes().values())


def fixed(node):
    """Options that a node cannot do without."""
    return {"num_householder": SIZES["n"]} if "num_householder" in option_names(node) else {}


def option_names(node):
    return [attr.name for attr in node.attrs]


def shown(node, name):
    """A port's or option's name in the operator's signature."""
    return node.shown(name, True)


def needed_by(node, names):
    """Options that ports need beside them, and other ports they need."""
    options = {}
    if {"a_log", "dt_bias"} & set(names) and "safe_gate" in option_names(node):
        options["safe_gate"] = True
    if "state_checkpoints" in names:
        options["checkpoint_every_n_tokens"] = node.family.checkpoint_step
    return options


def all_optional(node):
    """Every optional port that can be given at once: a pool excludes a state per sequence."""
    return [p.name for p in node.inputs if p.optional and p.role != "pool"]


def tensors(node, optional=(), *, sizes=SIZES, dtype=torch.float32, long=False, options=None):
    """One tensor for every required port and these optional ones, in the ports' order.

    long: the alternative with the higher rank, where a port has two (token-major, D per channel).
    """
    rng = torch.Generator().manual_seed(7)
    sizes = dict(sizes)
    every = (options or {}).get("checkpoint_every_n_tokens") or node.family.checkpoint_step
    sub = sizes["n"] if node.family.traits.substeps else 1
    sizes["R"] = checkpoint_rows(sizes["T"] * sub, sizes["N"], every)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    made = {}
    for port in node.inputs:
        if port.optional and port.name not in optional:
            continue
        if port.name == "cu_seqlens":
            made[port.name] = torch.tensor(OFFSETS, dtype=torch.int32)
            continue
        if port.name == "state_indices":
            made[port.name] = torch.tensor(SLOTS, dtype=torch.int32)
            continue
        ranks = port.shapes
        letters = list(ranks[(max if long else min)(ranks)])
        if port.role == "state" and "state_indices" in optional:
            letters[0] = "P"
        shape = [dim_of(letter, sizes) for letter in letters]
        value = torch.rand(shape, generator=rng, dtype=torch.float64)
        if port.name in ("g", "a"):
            value = -value
        elif port.name not in ("beta", "w"):
            value = value - 0.5
        io = port.dtype in ("io", "rows")
        made[port.name] = value.to(dtype if io else wide)
    return made


def calls(node):
    """How a node's operator is called: a function of node-named tensors and options.

    The backward has no public function; its registered operator is called as autograd does.
    """
    if node.direction == "backward":
        op = getattr(torch.ops.lagraph, node.op).default

        def run(given, **options):
            text = lagraph.plan.request(node, options, label=node.op, op_names=True).text
            return op(*(given.get(name) for name in node.input_names), text)

        return run

    from lagraph import ops

    function = getattr(ops, node.op)
    accepted = set(node.family.op_order[node.direction])

    def run(given, **options):
        named = {shown(node, name): value for name, value in (given | options).items()}
        return function(**{name: value for name, value in named.items() if name in accepted})

    run.function = function
    return run


def flat(results):
    """The tensors of a call's results, in order."""
    if isinstance(results, torch.Tensor):
        return [results]
    return [x for x in results if x is not None]


def graph_of(node, given, *, data_type=None, device="cpu", **options):
    """A graph with this node, its ports declared like these tensors; the graph and the outputs."""
    graph = lagraph.Graph(io_data_type=data_type, device=device)
    ports = {
        name: graph.tensor_like(x, name=name) if isinstance(x, torch.Tensor) else x
        for name, x in given.items()
    }
    outputs = getattr(graph, node.name)(*(ports.get(name) for name in node.input_names), **options)
    return graph, dict(zip(node.output_names, outputs, strict=True))


def ids(node):
    return node.name
