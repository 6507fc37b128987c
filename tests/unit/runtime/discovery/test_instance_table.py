import asyncio

import pytest

from penstock.core.errors import Overloaded
from penstock.core.types.instances import InstancePut, InstanceRemoved, WatchSynced
from penstock.runtime.discovery.view import InstanceTable
from penstock.testing.planes.scripted_worker import scripted_instance

ONE, TWO = (scripted_instance(f"tcp://127.0.0.1:{i}", worker_id=i) for i in (1, 2))


def told(cursor):
    return list(cursor.changes())


def test_a_cursor_tells_what_it_has_not_told():
    table = InstanceTable()
    woken = []
    cursor = table.cursor(lambda: woken.append(True))
    assert told(cursor) == []
    table.put(ONE)
    table.put(ONE)
    table.mark_synced()
    assert len(woken) == 2
    assert told(cursor) == [InstancePut(instance=ONE), WatchSynced()]
    table.put(TWO)
    table.remove(1, "gone")
    table.remove(1, "gone again")
    assert told(cursor) == [InstanceRemoved(worker_id=1, reason="gone"), InstancePut(instance=TWO)]
    table.put(ONE)
    table.remove(1, "gone")
    assert told(cursor) == [], "what came and went in between"
    woken.clear()
    cursor.close()
    cursor.close()
    table.remove(2, "gone")
    assert woken == []


def test_watchers_are_bounded_and_leaving_makes_room():
    table = InstanceTable(watchers_max=1)
    watch = table.watch()
    with pytest.raises(Overloaded, match="watchers_max"):
        table.watch()
    del watch
    table.watch()


def test_reasons_are_kept_for_the_latest_alone():
    table = InstanceTable()
    instances = [scripted_instance("tcp://127.0.0.1:1", worker_id=number) for number in range(1500)]
    for instance in instances:
        table.put(instance)
    cursor = table.cursor(lambda: None)
    told(cursor)
    for instance in instances:
        table.remove(instance.worker_id, "gone")
    assert [change.reason for change in told(cursor)].count("gone") == 1024


@pytest.mark.virtual
async def test_closing_ends_every_watch():
    table = InstanceTable()
    table.mark_synced()

    async def count():
        return len([change async for change in table.watch()])

    async with asyncio.TaskGroup() as tasks:
        counts = [tasks.create_task(count()) for _ in range(3)]
        await asyncio.sleep(1)
        table.close()
    assert [task.result() for task in counts] == [1, 1, 1]
