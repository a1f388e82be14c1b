"""Graphs as plain data, as JSON text and back, and as a digest."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from lagraph import registry
from lagraph.desc import data_type, to_data_type
from lagraph.errors import GraphError
from lagraph.tensor import tensor_data

if TYPE_CHECKING:
    import torch

    from lagraph.graph import Graph
    from lagraph.tensor import Tensor

__all__ = ["digest", "from_text", "plain", "to_text"]

FORMAT = 1


def _data_types(graph: Graph) -> dict[str, str]:
    names = ("io_data_type", "intermediate_data_type", "compute_data_type")
    return {name: to_data_type(getattr(graph, name)).name for name in names}


def _dtype_of(name: str) -> torch.dtype | None:
    return data_type[name].value


def plain(graph: Graph) -> dict[str, Any]:
    """A graph as plain data; see `Graph.inspect`."""
    placed = graph._placed
    return {
        "name": graph.name,
        "context": _data_types(graph),
        "nodes": [] if placed is None else [{
            "name": placed.name,
            "type": placed.node.type,
            "inputs": {port: t.name for port, t in placed.inputs.items()},
            "outputs": {port: t.name for port, t in placed.outputs.items()},
            "params": json.loads(placed.request.text),
        }],
        "tensors": {t.name: tensor_data(t) for t in graph._tensors},
        "plan": graph.plan_name,
    }  # fmt: skip


def digest(graph: Graph) -> str:
    """A digest of a validated graph; see `Graph.key`."""
    placed = graph._require()
    ports = {
        port: [list(t.dim or ()), list(t.stride or ()), t.data_type.name]
        for port, t in (placed.inputs | placed.outputs).items()
    }
    text = json.dumps(
        [placed.node.type, placed.request.text, ports, str(graph.device), graph.sm_version]
    )
    return hashlib.sha256(text.encode()).hexdigest()


def to_text(graph: Graph) -> str:
    """A graph and its chosen plan as JSON."""
    placed = graph._require()
    return json.dumps({
        "lagraph": FORMAT,
        "name": graph.name,
        **_data_types(graph),
        "device": None if graph._device is None else str(graph._device),
        "sm_version": graph.sm_version,
        "tensors": [tensor_data(t) | {"name": t.name} for t in graph._tensors],
        "node": {
            "name": placed.name,
            "type": placed.node.type,
            "options": json.loads(placed.request.text),
            "inputs": {port: t.uid for port, t in placed.inputs.items()},
            "outputs": {port: t.uid for port, t in placed.outputs.items()},
        },
        "plan": graph.plan_name,
    })  # fmt: skip


def from_text(kind: type[Graph], text: str, handle: Any = None) -> Graph:
    """The graph of `to_text`, with its plan pinned but not built."""
    try:
        data = json.loads(text)
    except (TypeError, ValueError):
        raise GraphError("deserialize(): this is not the text of serialize().") from None
    version = data.get("lagraph") if isinstance(data, dict) else None
    if version != FORMAT:
        raise GraphError(f"deserialize(): format {version!r} is unknown; {FORMAT} is read.")
    graph = kind(
        data["name"], _dtype_of(data["io_data_type"]),
        _dtype_of(data["intermediate_data_type"]), _dtype_of(data["compute_data_type"]),
        sm_version=data["sm_version"], device=data["device"], handle=handle,
    )  # fmt: skip
    spec = data["node"]
    made: dict[int, Tensor] = {}
    produced = set(spec["outputs"].values())
    for item in data["tensors"]:
        if item["uid"] in produced:
            continue
        made[item["uid"]] = graph.tensor(
            item["dim"], item["stride"], _dtype_of(item["data_type"]), item["is_virtual"],
            name=item["name"], uid=item["uid"],
        )  # fmt: skip
    ports = {port: made[uid] for port, uid in spec["inputs"].items()}
    builder = getattr(graph, registry.node(spec["type"]).name)
    builder(**ports, **spec["options"], name=spec["name"])
    by_uid = {item["uid"]: item for item in data["tensors"]}
    outputs = graph._require().outputs
    for port, uid in spec["outputs"].items():
        item, out = by_uid[uid], outputs[port]
        out.set_uid(uid)
        if out.name != item["name"]:
            out.set_name(item["name"])
        out.set_output(not item["is_virtual"])
        if item["dtype_given"]:
            out.set_data_type(_dtype_of(item["data_type"]))
        if item["stride"] is not None:
            out.set_stride(item["stride"])
    if data["plan"] is not None:
        graph.create_execution_plans()
        graph.select_plan(data["plan"])
    return graph
