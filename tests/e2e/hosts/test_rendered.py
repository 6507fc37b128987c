"""What is rendered, run as processes: pods with addresses of their own, and a job of Slurm under stand-ins for its commands."""

import json
import os
import signal
import stat
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import ExitStack

import psutil
import pytest

from penstock.deploy.identity import SECRET_VARIABLE
from penstock.deploy.manifests.kubernetes import kubernetes_objects
from penstock.deploy.manifests.options import RenderOptions
from penstock.deploy.manifests.slurm import slurm_script
from penstock.deploy.state import ADMIN_TOKEN_VARIABLE
from penstock.graph import build
from tests.support.host import until
from tests.support.kubernetes.kubelet import NETWORK, command_of
from tests.support.kubernetes.thread import ApiServerThread
from tests.support.registries import free_port
from tests.support.rendered import by_kind, pods

pytestmark = pytest.mark.slow
TIMEOUT_S = 120.0
SECRET, TOKEN = "a secret of the test", "t" * 40


def get(url, body=None, token=TOKEN):
    """Ask; returns the status and the JSON of the answer, or None where nobody listens."""
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, None if body is None else json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())
    except OSError:
        return None


def chat(url):
    body = {"model": "penstock-demo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5}
    return get(f"{url}/v1/chat/completions", body)


def ready_workers(url):
    answer = get(f"{url}/admin/workers")
    if answer is None or answer[0] != 200:
        return []
    return [each for each in answer[1]["workers"] if each["condition"] in {"ready", "prefill_only"}]


class Pod:
    """A rendered pod as a process: what a kubelet gives it, and an address of its own on the loopback interface."""

    def __init__(self, name, address, template, files, folder, extra, stack):
        (self.container,) = template["spec"]["containers"]
        self.address, self.grace_s = address, template["spec"]["terminationGracePeriodSeconds"]
        folder.mkdir()
        pod = {"metadata": {"name": name, "uid": f"uid-{name}"}, "spec": template["spec"]}
        words, environment = command_of(pod, address, files, folder, {"secret": SECRET, "admin-token": TOKEN})
        self.process = subprocess.Popen(words, env=environment | extra)
        stack.callback(self.end)

    def probe(self, kind):
        asked = self.container[kind]["httpGet"]
        ports = {port["name"]: port["containerPort"] for port in self.container["ports"]}
        answer = get(f"http://{self.address}:{ports[asked['port']]}{asked['path']}")
        return None if answer is None else answer[0]

    def listening(self):
        """Give the ports at which its processes listen."""
        family = [psutil.Process(self.process.pid)]
        family += family[0].children(recursive=True)
        return {
            each.laddr.port
            for process in family
            for each in process.net_connections("tcp")
            if each.status == psutil.CONN_LISTEN
        }

    def end(self):
        self.process.terminate()
        try:
            return self.process.wait(timeout=self.grace_s)
        finally:
            self.process.kill()
            self.process.wait()


def test_rendered_pods_answer_and_open_the_ports_that_they_declare(tmp_path):
    port = free_port()
    graph = build(
        {
            "name": "chat",
            "model": "demo",
            "frontend": {"port": port},
            "roles": {
                "prefill": {"engine": "mock"},
                "decode": {"engine": "mock", "replicas": 2},
            },
            "supervision": {"spare_processes": 0},
        }
    )
    objects = kubernetes_objects(graph, RenderOptions())
    (config,) = by_kind(objects, "ConfigMap").values()
    replicas = {name: each["spec"]["replicas"] for name, each in by_kind(objects, "Deployment").items()}
    with ApiServerThread() as cluster, ExitStack() as stack:
        extra = {"KUBECONFIG": str(cluster.write_config(tmp_path / "config"))}
        running = {}
        for name, template in pods(objects).items():
            for number in range(replicas[name]):
                address = f"{NETWORK}.{len(running) + 1}"
                pod = f"{name}-{number}"
                running[pod] = Pod(pod, address, template, config["data"], tmp_path / pod, extra, stack)
        for pod in running.values():
            until(lambda pod=pod: pod.probe("readinessProbe") == 200)
            assert pod.probe("startupProbe") == pod.probe("livenessProbe") == 200
        url = f"http://{NETWORK}.1:{port}"
        assert next(iter(running)) == "chat-frontend-0"
        until(lambda: len(ready_workers(url)) == 3)
        status, answer = chat(url)
        assert (status, answer["usage"]["completion_tokens"]) == (200, 5)
        for name, pod in running.items():
            declared = {port["containerPort"] for port in pod.container["ports"]}
            assert pod.listening() == declared, name
        assert running["chat-decode-1"].end() == 0, "drained within the grace period"
        until(lambda: len(ready_workers(url)) == 2)
        assert chat(url)[0] == 200


def command(path, text):
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_a_job_of_slurm_answers_from_two_nodes_and_ends_by_its_signal(tmp_path):
    port, hub, planner = free_port(), free_port(), free_port()
    graph = build(
        {
            "name": "job",
            "model": "demo",
            "frontend": {"port": port},
            "runtime": {"hub": f"tcp://127.0.0.1:{hub}"},
            "roles": {"aggregated": {"engine": "mock", "replicas": 3}},
            "supervision": {"spare_processes": 0},
            "planner": {
                "min_workers": 4, "react_period_s": 0.5, "floor_period_s": 1, "address": f"tcp://127.0.0.1:{planner}",
            },
        }
    )  # fmt: skip
    script = tmp_path / "job.sh"
    script.write_text(slurm_script(graph, RenderOptions(nodes=2)))
    programs = tmp_path / "programs"
    programs.mkdir()
    hosts = """#!/bin/bash\n[[ "$1 $2" == 'show hostnames' ]] || exit 1\necho 127.0.0.1\necho 127.0.0.2\n"""
    command(programs / "scontrol", hosts)
    command(
        programs / "srun",
        f"""#!/bin/bash
while [[ $1 == --* ]]; do
  if [[ $1 == --nodelist=* ]]; then node=${{1#--nodelist=}}; fi
  shift
done
export PENSTOCK_HOST="node-$node" XDG_RUNTIME_DIR="{tmp_path}/$node" PENSTOCK_STATE_DIR="{tmp_path}/$node/state"
mkdir -p "$XDG_RUNTIME_DIR"
exec "$@"
""",
    )
    environment = os.environ | {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "node-[1-2]",
        "PENSTOCK": f"{sys.executable} -m penstock",
        ADMIN_TOKEN_VARIABLE: TOKEN,
    }
    environment.pop(SECRET_VARIABLE, None)
    job = subprocess.Popen(["bash", script], env=environment, cwd=tmp_path)
    try:
        url = f"http://127.0.0.1:{port}"
        until(lambda: len(ready_workers(url)) == 4)
        assert sorted(each["name"] for each in ready_workers(url)) == [
            "worker-1@node-127.0.0.1", "worker-1@node-127.0.0.2", "worker-2@node-127.0.0.1",
            "worker-2@node-127.0.0.2",
        ], "the planner has started the fourth on the second node"  # fmt: skip
        status, answer = chat(url)
        assert (status, answer["usage"]["completion_tokens"]) == (200, 5)
        started = psutil.Process(job.pid).children(recursive=True)
        job.send_signal(signal.SIGTERM)
        assert job.wait(timeout=TIMEOUT_S) == 0
        _, alive = psutil.wait_procs(started, timeout=TIMEOUT_S)
        assert not alive
        assert not (tmp_path / "penstock-7.yaml").exists()
    finally:
        if job.poll() is None:
            job.terminate()
            job.wait(timeout=TIMEOUT_S)
