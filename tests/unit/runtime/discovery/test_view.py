"""A grace time that ends while the registry is away."""

import asyncio
from types import SimpleNamespace

import pytest

from penstock.runtime.discovery.registrations import RegistryMetrics
from penstock.runtime.discovery.view import RegistryView
from penstock.testing.planes.scripted_worker import scripted_instance


@pytest.mark.virtual
async def test_a_grace_that_ends_while_the_registry_is_away_ends_after_it_is_back():
    instance, is_there = scripted_instance("tcp://127.0.0.1:1"), True
    view = RegistryView(
        SimpleNamespace(decode=lambda _: instance), RegistryMetrics(None), grace_s=3.0, instances_max=9,
        watchers_max=9, is_reachable=lambda: is_there,
    )  # fmt: skip
    view.put(instance.worker_id, b"")
    view.lapse(instance.worker_id, "deleted")
    is_there = False
    await asyncio.sleep(20.0)
    assert len(view) == 1
    is_there = True
    await asyncio.sleep(3.5)
    assert len(view) == 0
    view.close()
