"""What a change of graphs says at its end."""

import asyncio
from types import SimpleNamespace

import pytest

from penstock.deploy.supervisor.applier import Applier
from penstock.graph import Graph
from penstock.testing.loop import run_async


@pytest.mark.parametrize("is_cut", ["before its first step", "half-way", ""])
def test_a_change_that_is_cut_off_says_so_and_is_an_error(is_cut):
    async def scenario():
        begun = asyncio.Event()

        async def run():
            begun.set()
            if is_cut:
                await asyncio.Event().wait()

        pool = SimpleNamespace(hold=lambda _: None, let_go=lambda: None, define=lambda _: None, workers=[])
        graph = Graph.parse({"model": "demo"}, source="test")
        applier = Applier(
            graph,
            part=None,
            pool=pool,
            make_templates=None,
            links=SimpleNamespace(change=lambda _: None),
            make_links=None,
            say=lambda *_: None,
        )
        async with asyncio.TaskGroup() as group:
            applier.open(group, None)
            applier._begin(graph, {}, {}, SimpleNamespace(run=run, has_switched=False))
            if is_cut != "before its first step":
                await begun.wait()
            if is_cut:
                applier.close()
        view = await applier.watch(0)
        assert view.is_over
        if is_cut:
            assert "stopped half-way" in view.lines[-1]
            assert "stopped half-way" in view.error.message
        else:
            assert (view.lines, view.error) == (("done",), None)

    run_async(scenario(), timeout_s=10.0)
