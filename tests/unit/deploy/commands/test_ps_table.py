"""`penstock ps` keeps its columns whatever names are in them."""

from penstock.core.types.scaling import ReplicaState
from penstock.deploy.commands.hosted.ps import Listed, Remote, table
from penstock.deploy.control.messages import ProcessView


def test_a_worker_of_another_host_keeps_the_columns() -> None:
    here = ProcessView(name="worker-1", pid=1, state=ReplicaState.READY)
    there = Remote(
        name="worker-1@host-b", role="decode", condition="ready", host="host-b", address="tcp://h:1"
    )
    listed = Listed(name="demo", state="running", directory="d", processes=(here,), remote=(there,))
    _, first, second = table([listed])
    assert first.index(" ready ") == second.index(" ready ")
    _, alone = table([Listed(name="demo", state="running", directory="d", processes=(here,))])
    assert alone.startswith("  worker-1     ready ")
