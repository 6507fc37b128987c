"""Converts a layout to a deployment graph for `penstock simulate` and `penstock serve`."""

from typing import Any

import yaml

from penstock.graph import Graph, build
from penstock.perf.search.search import Layout, RoleLayout
from penstock.plan.question import BLOCK_SIZE, Question

_RUNNING_MAX = 1024


def graph_of(question: Question, layout: Layout) -> Graph:
    """Build the graph of a layout."""
    return build(graph_data(question, layout))


def graph_data(question: Question, layout: Layout) -> dict[str, Any]:
    """Build the graph of a layout as plain data."""
    router: dict[str, Any] = {"policy": "kv"}
    if layout.is_disaggregated:
        prefill, decode = layout.role_layouts
        rate = question.link_bytes_per_s(prefill.parallel, decode.parallel)
        router["disagg"] = {"link_bytes_per_s": rate}
    return {
        "name": "plan",
        "model": question.model,
        "block_size": BLOCK_SIZE,
        "router": router,
        "roles": {
            role_layout.role.value: _role(question, role_layout) for role_layout in layout.role_layouts
        },
        "slo": question.slo.model_dump(),
    }


def graph_text(question: Question, layout: Layout, note: str) -> str:
    """Format the graph as YAML, with the lines of `note` as comments above it."""
    said = "".join(f"# {line}\n" for line in note.splitlines())
    return said + yaml.safe_dump(graph_data(question, layout), sort_keys=False)


def _role(question: Question, role_layout: RoleLayout) -> dict[str, Any]:
    model, demand = question.price(role_layout.parallel), question.demand
    each = model.kv_held_tokens(demand.input_tokens + demand.output_tokens)
    room = int(model.kv_capacity_tokens / each) // role_layout.parallel.dp
    in_step = role_layout.max_batch_tokens // model.verified_tokens
    return question.role(
        role_layout.parallel,
        replicas=role_layout.workers,
        max_batch_tokens=role_layout.max_batch_tokens,
        max_running_requests=max(min(room, in_step, _RUNNING_MAX), 1),
    )
