"""A layout as a deployment graph: what `penstock simulate` and `penstock serve` take."""

from typing import Any

import yaml

from penstock.graph import Graph, build
from penstock.perf.search import Crew, Layout
from penstock.plan.question import BLOCK_SIZE, Question

_RUNNING_MAX = 1024


def graph_of(question: Question, layout: Layout) -> Graph:
    """Make the graph of a layout."""
    return build(graph_data(question, layout))


def graph_data(question: Question, layout: Layout) -> dict[str, Any]:
    """Describe a layout, as plain data."""
    router: dict[str, Any] = {"policy": "kv"}
    if layout.is_apart:
        prefill, decode = layout.crews
        rate = question.link_bytes_per_s(prefill.parallel, decode.parallel)
        router["disagg"] = {"link_bytes_per_s": rate}
    return {
        "name": "plan",
        "model": question.model,
        "block_size": BLOCK_SIZE,
        "router": router,
        "roles": {crew.role.value: _role(question, crew) for crew in layout.crews},
        "slo": question.slo.model_dump(),
    }


def graph_text(question: Question, layout: Layout, note: str) -> str:
    """Write the graph as YAML; `note` is said above it, each line as a comment."""
    said = "".join(f"# {line}\n" for line in note.splitlines())
    return said + yaml.safe_dump(graph_data(question, layout), sort_keys=False)


def _role(question: Question, crew: Crew) -> dict[str, Any]:
    model, demand = question.price(crew.parallel), question.demand
    room = model.kv_capacity_tokens // (demand.input_tokens + demand.output_tokens) // crew.parallel.dp
    in_step = crew.max_batch_tokens // model.verified_tokens
    return question.role(
        crew.parallel,
        replicas=crew.workers,
        max_batch_tokens=crew.max_batch_tokens,
        max_running_requests=max(min(room, in_step, _RUNNING_MAX), 1),
    )
