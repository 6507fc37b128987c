"""`penstock operator` as a process: it leads, runs what it finds, and gives up the lead when it is told to end."""

import os
import signal
import subprocess
import sys
import time

import pytest

from penstock.deploy.operator.definitions import GRAPHS, definitions
from penstock.deploy.operator.leadership import LOCK
from tests.support.kubernetes.cluster import Cluster
from tests.support.kubernetes.fields import Manager
from tests.support.kubernetes.store import Store
from tests.support.kubernetes.thread import ApiServerThread

pytestmark = pytest.mark.slow
SUITE = Manager("suite", "Update")
GRAPH = {
    "metadata": {"name": "chat"},
    "spec": {"graph": {"model": "demo", "roles": {"aggregated": {"replicas": 2}}}},
}


def holder(store: Store) -> str:
    kept = store.all(store.kinds.find("", "v1", "configmaps"))
    data = [each.body["data"] for each in kept if each.body["metadata"]["name"] == LOCK]
    return next((each.get("operator", "") for each in data), "")


def ready(store: Store) -> bool:
    (graph,) = store.all(store.kinds.find(GRAPHS.group, GRAPHS.version, GRAPHS.plural))
    conditions = (graph.body.get("status") or {}).get("conditions", ())
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def test_the_command_leads_runs_and_ends(tmp_path):
    with ApiServerThread() as cluster:
        store = cluster.server.store
        kind = store.kinds.find("apiextensions.k8s.io", "v1", "customresourcedefinitions")
        for definition in definitions():
            cluster.do(lambda body=definition: store.create(kind, "", body, SUITE))
        graphs = store.kinds.find(GRAPHS.group, GRAPHS.version, GRAPHS.plural)
        cluster.do(lambda: store.create(graphs, "default", GRAPH, SUITE))
        environment = os.environ | {"KUBECONFIG": str(cluster.write_config(tmp_path / "config"))}
        process = subprocess.Popen([sys.executable, "-m", "penstock", "operator"], env=environment)
        controllers = Cluster(store)
        try:
            deadline = time.monotonic() + 60
            while not cluster.do(lambda: (controllers.settle(), ready(store))[1]):
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.05)
            assert cluster.do(lambda: holder(store))
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
            assert cluster.do(lambda: holder(store)) == "", "another may lead at once"
        finally:
            process.kill()
            process.wait()


def test_no_cluster_is_one_line(tmp_path):
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    ended = subprocess.run(
        [sys.executable, "-m", "penstock", "operator"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 2
    assert ended.stderr.startswith("penstock: kubernetes: this is no pod")
    assert len(ended.stderr.splitlines()) == 1
