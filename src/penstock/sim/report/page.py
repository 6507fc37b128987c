"""The HTML report of one simulated deployment, or of several side by side."""

import html
from collections.abc import Sequence

from penstock.sim.report.charts import same_scale, say_s
from penstock.sim.report.document import chart_grid, make_document
from penstock.sim.report.figures import Run, overall_charts, scaling_charts, total_charts, worker_charts
from penstock.sim.report.summary import Row, summarize
from penstock.sim.role_group import RoleGroup

_TILES = ("TTFT, p50", "TTFT, p99", "TPOT, p50", "goodput", "output", "KV hit ratio", "energy", "cost")
_PAIR_WIDTH_PX = 380


def make_page(heading: str, runs: Sequence[Run]) -> str:
    """Make the page.

    Args:
        heading: workload and deployments.
        runs: the runs; several are shown side by side.
    """
    rows = summarize([run.report for run in runs])
    body = _one(runs[0], rows) if len(runs) == 1 else _several(runs, rows)
    return make_document(heading, body)


def _one(run: Run, rows: list[Row]) -> str:
    tiles = "".join(
        f'<div class="tile"><small>{row.name}</small><b>{row.cells[0].value}</b> {row.unit}</div>'
        for row in rows
        if row.name in _TILES
    )
    return (
        f'<p class="about">{_about(run)}</p><div class="tiles">{tiles}</div>'
        f"<h2>Workers over time</h2>{chart_grid([*scaling_charts([run]), *worker_charts(run)])}"
        f"<h2>What users see</h2>{chart_grid(overall_charts([run]))}"
        f"<h2>In numbers</h2>{_table(rows, [])}"
    )


def _several(runs: Sequence[Run], rows: list[Row]) -> str:
    about = "".join(f'<p class="about"><b>{html.escape(run.name)}</b>: {_about(run)}</p>' for run in runs)
    together = [*scaling_charts(runs), *overall_charts(runs), *total_charts(runs)]
    columns = "".join(f"<h3>{html.escape(run.name)}</h3>" for run in runs)
    for kind in zip(*(worker_charts(run) for run in runs), strict=True):
        columns += "".join(chart.to_svg() for chart in same_scale(kind))
    style = f"grid-template-columns:repeat({len(runs)},minmax({_PAIR_WIDTH_PX}px,1fr))"
    return (
        f"{about}<h2>In numbers</h2>{_table(rows, [run.name for run in runs])}"
        f"<h2>Together</h2>{chart_grid(together)}"
        f'<h2>Workers over time, side by side</h2><div class="pairs" style="{style}">{columns}</div>'
    )


def _about(run: Run) -> str:
    graph, deployment = run.deployment.graph, run.deployment
    slo = "" if run.slo is None else f", targets: TTFT {say_s(run.slo.ttft_s)}, TPOT {say_s(run.slo.itl_s)}"
    yields = [role_group.spec.tokens_per_step for role_group in deployment.decoding]
    speculation = "" if max(yields) == 1 else f", {max(yields):g} tokens a decode step"
    link = f"; {deployment.link}" if deployment.link else ""
    return html.escape(
        f"{graph.model} on {_devices(deployment.role_groups)}, policy {graph.router.policy},"
        f" blocks of {graph.block_size} tokens{speculation}{slo}; {deployment.expenses}{link}"
    )


def _devices(role_groups: Sequence[RoleGroup]) -> str:
    """Format the devices of each role."""
    if len(role_groups) == 1:
        return f"{role_groups[0].devices:,} {role_groups[0].hardware.name}"
    return " and ".join(
        f"{role_group.spec.replicas:,} {role_group.role} workers of {role_group.spec.devices} {role_group.hardware.name}"
        for role_group in role_groups
    )


def _table(rows: list[Row], names: list[str]) -> str:
    head = (
        f"<tr><th></th><th></th>{''.join(f'<th>{html.escape(name)}</th>' for name in names)}</tr>"
        if names
        else ""
    )
    body = ""
    for row in rows:
        body += f"<tr><td>{html.escape(row.name)}</td><td>{row.unit}</td>"
        for cell in row.cells:
            difference = f"<small>{cell.difference}</small>" if names else ""
            best = ' class="best"' if cell.is_best else ""
            body += f"<td{best}>{'★ ' if cell.is_best else ''}{cell.value}{difference}</td>"
        body += "</tr>"
    return f'<div class="table"><table>{head}{body}</table></div>'
