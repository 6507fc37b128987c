"""Nodes whose pods are processes of this host: each has an address of its own on the loopback interface.

Kept of a kubelet: environment and arguments of the pod's only container, files of its ConfigMap, its service account's token, startup and readiness probes, preStop,
SIGTERM at the deletion and SIGKILL after the grace period, restarts with a pause. Not kept: images, volumes, cgroups, liveness.
"""

import asyncio
import contextlib
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from tests.support.kubernetes.api_server import ApiServer
from tests.support.kubernetes.eviction import is_ready
from tests.support.kubernetes.fields import Manager
from tests.support.kubernetes.resources import Kind, Object
from tests.support.kubernetes.store import Store, now
from tests.support.kubernetes.thread import write_config

NETWORK = f"127.{1 + os.getpid() % 250}.{os.getpid() // 250 % 250}"
"""Of loopback addresses that no other run of the tests has."""
PLANNER = f"{NETWORK}.254"
"""Stands for the Service of the planner's pod, and for the pod."""
_KUBELET = Manager("kubelet", "Update", "status")
_SCHEDULER = Manager("kube-scheduler", "Update")
_PROBE_S = 0.2
_RESTART_S_MAX = 5.0
_POD_COUNT_MAX = 253


def command_of(
    pod: Object, address: str, files: Mapping[str, str], folder: Path, secrets: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """Give the command and the environment of a pod's only container, and write its files.

    Args:
        pod: with `metadata` and `spec`.
        address: of the pod.
        files: of its ConfigMap, for `/etc/penstock`.
        folder: stands for `/tmp` and `/etc/penstock`.
        secrets: values of the Secret, by key.
    """
    (container,) = pod["spec"]["containers"]
    for file, text in files.items():
        told = re.sub(r"tcp://[a-z-]+-planner:", f"tcp://{PLANNER}:", text)
        (folder / file).write_text(told.replace("0.0.0.0", address))
    given = {
        "status.podIP": address,
        "metadata.name": pod["metadata"]["name"],
        "metadata.uid": pod["metadata"]["uid"],
        "spec.nodeName": pod["spec"].get("nodeName", "node-1"),
    }
    environment = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    for variable in container["env"]:
        source = variable.get("valueFrom", {})
        if "fieldRef" in source:
            environment[variable["name"]] = given.get(source["fieldRef"]["fieldPath"], "")
        elif "secretKeyRef" not in source:
            environment[variable["name"]] = variable["value"].replace("/tmp", str(folder))
        elif (key := source["secretKeyRef"]["key"]) in secrets:
            environment[variable["name"]] = secrets[key]
    words = [re.sub(r"\$\((\w+)\)", lambda match: environment[match[1]], word) for word in container["args"]]
    words = [word.replace("/etc/penstock/", f"{folder}/").replace("0.0.0.0", PLANNER) for word in words]
    return [sys.executable, "-m", "penstock", *words], environment


class Nodes:
    """Schedules and runs the pods of one API server's store. One event loop owns it; its tasks are of `group`."""

    def __init__(
        self,
        server: ApiServer,
        folder: Path,
        group: asyncio.TaskGroup,
        *,
        secrets: Mapping[str, str],
        names: tuple[str, ...] = ("node-1", "node-2"),
    ) -> None:
        """Have nodes without pods.

        Args:
            server: the API server, to which pods have the tokens of their service accounts.
            folder: for pods' files.
            group: runs pods.
            secrets: what Secrets have, by key.
            names: of the nodes.
        """
        self._server, self._store, self._folder, self._group = server, server.store, folder, group
        self._secrets = secrets
        self._pods: dict[str, _RunningPod] = {}
        self._started = 0
        for name in names:
            self._store.create(self._kind("nodes"), "", {"metadata": {"name": name}, "spec": {}}, _SCHEDULER)

    def sync(self, pod: Object) -> None:
        """Go on with one pod: place it, start it, or have it end."""
        uid, is_deleted = pod["metadata"]["uid"], "deletionTimestamp" in pod["metadata"]
        running = self._pods.get(uid)
        if running is not None:
            if is_deleted:
                running.ending.set()
        elif is_deleted:
            self.remove(pod)
        elif (pod["spec"].get("nodeName") or self._place(pod)) is not None:
            self._started += 1
            assert self._started <= _POD_COUNT_MAX
            address = f"{NETWORK}.{self._started}"
            files: dict[str, str] = {}
            for volume in pod["spec"]["volumes"]:
                if "configMap" in volume:
                    name = (pod["metadata"]["namespace"], volume["configMap"]["name"])
                    files |= self._store.get(self._kind("configmaps"), name).body["data"]
            self._pods[uid] = running = _RunningPod(self, pod, address, files)
            folder = self._folder / pod["metadata"]["name"]
            folder.mkdir()
            self._group.create_task(running.run(folder, self._secrets, self._way_to_api(pod, folder)))

    def pods_on(self, node: str) -> list[str]:
        return [
            each.body["metadata"]["name"]
            for each in self._store.all(self._kind("pods"))
            if each.body["spec"].get("nodeName") == node
        ]

    def kill(self, pod: str) -> None:
        """End all processes of a pod at once, as a kernel without memory or a node that loses power does."""
        (running,) = (each for each in self._pods.values() if each.name == pod)
        running.kill()

    def cordon(self, node: str, *, on: bool = True) -> None:
        """Let no new pod be placed on a node, or again."""
        self._store.change(
            self._kind("nodes"),
            ("", node),
            lambda live: {**live, "spec": {**live["spec"], "unschedulable": on}},
            _SCHEDULER,
        )

    def remove(self, pod: Object) -> None:
        name = (pod["metadata"]["namespace"], pod["metadata"]["name"])
        self._store.delete(self._kind("pods"), name, {"gracePeriodSeconds": 0})

    def set_status(self, pod: Object, *conditions: Object, **fields: Any) -> None:
        """Replace conditions of the same types, and these fields."""
        types = {each["type"] for each in conditions}

        def edit(live: Object) -> Object:
            status = live.get("status") or {}
            kept = [each for each in status.get("conditions") or () if each["type"] not in types]
            return {**live, "status": {**status, **fields, "conditions": [*kept, *conditions]}}

        name = (pod["metadata"]["namespace"], pod["metadata"]["name"])
        self._store.change(self._kind("pods"), name, edit, _KUBELET, subresource="status")

    def _way_to_api(self, pod: Object, folder: Path) -> dict[str, str]:
        """Give the variables by which a pod asks the API, as its service account may; without a token it asks nothing."""
        if not pod["spec"]["automountServiceAccountToken"]:
            return {}
        token = self._server.token_of(pod["metadata"]["namespace"], pod["spec"]["serviceAccountName"])
        return {"KUBECONFIG": str(write_config(self._server.url, folder / "config", token=token))}

    def _place(self, pod: Object) -> str | None:
        """Choose the free node with the fewest pods; None, with a condition, where there is none."""
        nodes = self._store.all(self._kind("nodes"))
        free = [each.body["metadata"]["name"] for each in nodes if not each.body["spec"].get("unschedulable")]
        if not free:
            text = f"0/{len(nodes)} nodes are available: {len(nodes)} node(s) were unschedulable."
            condition = {
                "type": "PodScheduled",
                "status": "False",
                "reason": "Unschedulable",
                "message": text,
            }
            self.set_status(pod, condition, phase="Pending")
            return None
        node: str = min(free, key=lambda name: (len(self.pods_on(name)), name))
        name = (pod["metadata"]["namespace"], pod["metadata"]["name"])
        bound = self._store.change(
            self._kind("pods"),
            name,
            lambda live: {**live, "spec": {**live["spec"], "nodeName": node}},
            _SCHEDULER,
        )
        pod["spec"] = bound.body["spec"]
        self.set_status(pod, {"type": "PodScheduled", "status": "True"})
        return node

    def _kind(self, plural: str) -> Kind:
        kind = self._store.kinds.find("", "v1", plural)
        assert kind is not None
        return kind


class _RunningPod:
    """The processes of one pod, from its placing to its end."""

    def __init__(self, nodes: Nodes, pod: Object, address: str, files: Mapping[str, str]) -> None:
        self.ending = asyncio.Event()
        self._nodes, self._pod, self._address, self._files = nodes, pod, address, files
        (self._container,) = pod["spec"]["containers"]
        self._process: asyncio.subprocess.Process | None = None
        self._restarts = 0
        self._last: Object = {}

    @property
    def name(self) -> str:
        return str(self._pod["metadata"]["name"])

    def kill(self) -> None:
        assert self._process is not None
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(self._process.pid)
            for each in (process, *process.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()

    async def run(self, folder: Path, secrets: Mapping[str, str], environment: Mapping[str, str]) -> None:
        words, own = command_of(self._pod, self._address, self._files, folder, secrets)
        while not self.ending.is_set():
            with (folder / "log").open("ab") as log:
                self._process = process = await asyncio.create_subprocess_exec(
                    *words, env={**own, **environment}, stdout=log, stderr=log
                )
            try:
                await self._watch(process)
                if self.ending.is_set():
                    await self._end(process)
            finally:
                if process.returncode is None:
                    self.kill()
                    await process.wait()
            if not self.ending.is_set():
                self._restarts += 1
                status = process.returncode or 0
                self._last = {
                    "terminated": {"exitCode": 128 - status if status < 0 else status}
                }  # as a shell counts
                self._say({"waiting": {"reason": "CrashLoopBackOff"}}, is_ready=False)
                await _first(self.ending.wait(), asyncio.sleep(min(_RESTART_S_MAX, 0.1 * 2**self._restarts)))
        self._nodes.remove(self._pod)

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        """Probe until the container ends or is to end."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=3)) as session:
            has_started, was_ready, failed = False, None, 0
            most = self._container["readinessProbe"].get("failureThreshold", 3)
            while process.returncode is None and not self.ending.is_set():
                has_started = has_started or await self._probe(session, "startupProbe")
                succeeds = has_started and await self._probe(session, "readinessProbe")
                failed = 0 if succeeds else failed + 1
                is_ready_now = succeeds or (bool(was_ready) and failed < most)
                if is_ready_now is not was_ready and not self.ending.is_set():
                    self._say({"running": {"startedAt": now()}}, is_ready=is_ready_now)
                    was_ready = is_ready_now
                await _first(self.ending.wait(), process.wait(), asyncio.sleep(_PROBE_S))

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        loop = asyncio.get_running_loop()
        until_s = loop.time() + self._pod["spec"]["terminationGracePeriodSeconds"]
        hook = self._container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command")
        if hook:
            await (await asyncio.create_subprocess_exec(*hook)).wait()
        if process.returncode is None:
            process.terminate()
        async with asyncio.timeout_at(until_s):  # no pod of ours needs SIGKILL
            assert await process.wait() == 0, self.name

    async def _probe(self, session: aiohttp.ClientSession, kind: str) -> bool:
        asked = self._container[kind]["httpGet"]
        ports = {port["name"]: port["containerPort"] for port in self._container["ports"]}
        try:
            async with session.get(f"http://{self._address}:{ports[asked['port']]}{asked['path']}") as answer:
                return 200 <= answer.status < 400
        except (aiohttp.ClientError, TimeoutError):
            return False

    def _say(self, state: Object, *, is_ready: bool) -> None:
        container = {
            "name": self._container["name"], "image": self._container["image"], "restartCount": self._restarts,
            "ready": is_ready, "state": state, "lastState": self._last,
        }  # fmt: skip
        self._nodes.set_status(
            self._pod,
            {"type": "Ready", "status": "True" if is_ready else "False"},
            phase="Running",
            podIP=self._address,
            containerStatuses=[container],
        )


async def _first(*awaitables: Any) -> None:
    """Wait for the first of some."""
    tasks = [asyncio.ensure_future(each) for each in awaitables]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


def endpoints(store: Store, part: str, port: int) -> list[str]:
    """Give the URLs behind a Service of one part: its ready pods that do not end."""
    kind = store.kinds.find("", "v1", "pods")
    assert kind is not None
    return [
        f"http://{each.body['status']['podIP']}:{port}"
        for each in store.all(kind)
        if each.body["metadata"]["labels"].get("app.kubernetes.io/component") == part
        and is_ready(each.body)
        and "deletionTimestamp" not in each.body["metadata"]
    ]
