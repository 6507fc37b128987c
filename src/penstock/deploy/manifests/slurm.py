"""A batch script of Slurm: the first node has the registry, the frontends and the planner, the others join it."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from penstock.core.errors import ConfigError
from penstock.core.listening import Address
from penstock.deploy.card import frontend_drain_s, refuse_shape, worker_drain_s
from penstock.deploy.identity import SECRET_VARIABLE
from penstock.deploy.manifests.options import RenderOptions
from penstock.deploy.manifests.pod_graph import LEADER_PORT, PLANNER_PORT, dump, pods_of, workers_per_pod
from penstock.deploy.supervisor.local_part import runnable_roles
from penstock.deploy.supervisor.resources import devices_of
from penstock.graph import Graph, RoleSpec
from penstock.perf.hardware import find_hardware

_HUB_PORT = 7400
_NODES_MAX = 1024
_GRACE_S = 5


@dataclass(slots=True)
class _Node:
    """What one node runs: workers by role, and the GPUs that they take.

    Attributes:
        group: (number of the leader's node, rank of this node), where it is part of a worker over several nodes.
    """

    gpus: int = 0
    workers: dict[str, int] = field(default_factory=dict)
    group: tuple[int, int] | None = None

    @property
    def follows(self) -> bool:
        return self.group is not None and self.group[1] > 0

    def add(self, role: str, workers: int, gpus: int) -> None:
        self.workers[role] = self.workers.get(role, 0) + workers
        self.gpus += gpus

    @property
    def run(self) -> str:
        return ",".join(f"{role}={count}" for role, count in self.workers.items())


def slurm_script(graph: Graph, options: RenderOptions) -> str:
    """Write the script of a graph, which `sbatch` takes; partition and account are its flags.

    Files that the graph names are on a file system that all nodes share; images, mounts and the cache are of containers.

    Raises:
        ConfigError: the workers do not fit, the model has no weights, or the graph has what is of one node.
    """
    runnable_roles(graph)
    refuse_shape(graph.model)
    _refuse(graph)
    per_node = _gpus_per_node(graph, options.gpus_per_node)
    placed = _place(graph, options.nodes, per_node)
    spans = len(placed) > 1
    document = graph.model_dump(mode="json", exclude_unset=True)
    runtime = document.get("runtime", {})
    runtime.pop("hub", None)
    (document.get("planner") or {}).pop("address", None)
    has_hub = spans and graph.runtime.discovery == "local"
    has_planner = graph.planner is not None and (spans or graph.runtime.discovery != "local")
    port = _hub_port(graph)
    text = dump(document)
    drain_s = math.ceil(frontend_drain_s(graph) + worker_drain_s(graph) + _GRACE_S)
    first = ("frontend", "planner" if has_planner else "", placed[0].run)
    parts = [",".join(filter(None, first)), *(node.run for node in placed[1:])]
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name={graph.name}",
        f"#SBATCH --nodes={len(placed)}",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --exclusive",
        *([f"#SBATCH --gpus-per-node={per_node}"] if any(node.gpus for node in placed) else []),
        f"#SBATCH --signal=B:TERM@{drain_s}",
        f"#SBATCH --output={graph.name}-%j.log",
        _HEAD.format(
            parts=" ".join(f'"{part}"' for part in parts),
            secret=SECRET_VARIABLE,
            end=_delimiter(text),
            graph=text,
        ),
        _ADDRESSES.format(port=port) if has_hub else _NO_HUB,
        *([_groups(placed)] if any(node.group for node in placed) else []),
        *([_PLANNER.format(port=_planner_port(graph))] if has_planner else []),
        _RUN.format(
            wrapper=_NIXL if spans and _has_vllm(graph) else "",
            await_hub=_AWAIT_HUB.format(port=port) if has_hub else "",
            group=_GROUP if any(node.group for node in placed) else "",
        ),
    ]
    return "\n".join(lines)


def _place(graph: Graph, nodes: int | None, per_node: int) -> list[_Node]:
    """Deal the workers out: those with GPUs to the first node with room, the others in turn."""
    placed = [_Node() for _ in range(nodes or 1)]
    for name, role in graph.roles.present().items():
        gpus = devices_of(role)
        for index in range(pods_of(role)):
            if role.nodes > 1:
                node = _with_group(placed, name.value, role, gpus, may_add=nodes is None)
            else:
                node = _with_room(placed, gpus, per_node, index, may_add=nodes is None)
            if node is None:
                raise ConfigError(
                    f"--nodes {nodes}: roles.{name}: worker {index + 1} of {role.replicas} needs {gpus} GPUs"
                    f"{f' on each of {role.nodes} nodes' if role.nodes > 1 else ''}, and of the {per_node} of each node too few are left; raise --nodes or lower replicas"
                )
            node.add(name.value, workers_per_pod(role), gpus)
    if idle := [number for number, node in enumerate(placed) if number and not node.workers]:
        raise ConfigError(
            f"--nodes {len(placed)}: {len(idle)} of them would run nothing; lower it or raise replicas"
        )
    return placed


def _with_room(placed: list[_Node], gpus: int, per_node: int, index: int, *, may_add: bool) -> _Node | None:
    able = [node for node in placed if not node.follows]
    if not gpus:
        return able[index % len(able)]
    for node in able:
        if node.gpus + gpus <= per_node:
            return node
    if not may_add or len(placed) == _NODES_MAX:
        return None
    placed.append(_Node())
    return placed[-1]


def _with_group(placed: list[_Node], role: str, spec: RoleSpec, gpus: int, *, may_add: bool) -> _Node | None:
    """Place a worker over several nodes: give its leader's node; followers get a rank each, and run nothing else."""
    leader = next((number for number, node in enumerate(placed) if not node.group and not node.gpus), None)
    free = [
        number
        for number, node in enumerate(placed)
        if number not in {0, leader} and not node.workers and not node.group
    ]
    missing = spec.nodes - 1 - len(free) + (leader is None)
    if missing > 0 and (not may_add or len(placed) + missing > _NODES_MAX):
        return None
    for _ in range(missing):
        free.append(len(placed))
        placed.append(_Node())
    if leader is None:
        leader = free.pop(0)
    for rank, number in enumerate(free[: spec.nodes - 1], start=1):
        placed[number].add(role, 1, gpus)
        placed[number].group = (leader, rank)
    placed[leader].group = (leader, 0)
    return placed[leader]


def _groups(placed: list[_Node]) -> str:
    """Give the flags by which the nodes of a worker find each other."""
    lines = []
    for node in placed:
        flags = ""
        if node.group is not None:
            leader, rank = node.group
            flags = f"--leader tcp://${{nodes[{leader}]}}:{LEADER_PORT}" + (
                f" --node-rank {rank}" if rank else ""
            )
        lines.append(f'  "{flags}"\n')
    return f"# Of workers over several nodes: which one leads, and the others' ranks.\ngroups=(\n{''.join(lines)})\n"


def _gpus_per_node(graph: Graph, given: int | None) -> int:
    """Give the GPUs of each node.

    Raises:
        ConfigError: nobody says, or a worker needs more.
    """
    roles = {name: role for name, role in graph.roles.present().items() if devices_of(role)}
    most = [find_hardware(role.hardware).host_devices for role in roles.values()]
    known = [count for count in most if count is not None]
    per_node = given if given is not None else min(known, default=0)
    for name, role in roles.items():
        if not per_node:
            raise ConfigError(
                f"roles.{name}.hardware: {role.hardware}: nodes with it differ in their GPUs; give --gpus-per-node"
            )
        if devices_of(role) > per_node:
            raise ConfigError(
                f"roles.{name}: {devices_of(role)} GPUs on a node, and a node has {per_node}; raise roles.{name}.nodes with engine vllm or sglang,"
                " start such workers as servers of their engine, and name these by engine openai (docs/recipes.md), or lower the parallelism"
            )
    return per_node


def _refuse(graph: Graph) -> None:
    """Refuse what is of one node.

    Raises:
        ConfigError: one line for each.
    """
    if problems := list(_of_one_node(graph)):
        raise ConfigError("\n".join(problems))


def _of_one_node(graph: Graph) -> Iterator[str]:
    runtime = graph.runtime
    if runtime.discovery == "kubernetes":
        yield "runtime.discovery: kubernetes: nodes of Slurm are no pods; leave it out"
    if graph.planner is not None and graph.planner.scales == "pods":
        yield "planner.scales: pods: nodes of Slurm are no pods; leave it out"
    for name in ("join", "listen", "advertise", "leader"):
        if (value := getattr(runtime, name)) is not None:
            yield f"runtime.{name}: {value}: nodes are known when the job runs; leave it out, or set it to null by --set"
    for role, spec in graph.roles.present().items():
        if spec.adapters_per_worker is not None and spec.adapters_per_worker < len(spec.adapters):
            yield f"roles.{role}.adapters_per_worker: {spec.adapters_per_worker}: workers are counted on each node; leave it out"
        if len(set(spec.locations)) > 1:
            yield f"roles.{role}.locations: {len(set(spec.locations))} places: nodes say who they are; leave it out"


def _hub_port(graph: Graph) -> int:
    return _HUB_PORT if graph.runtime.hub is None else Address.parse(graph.runtime.hub).port


def _planner_port(graph: Graph) -> int:
    address = None if graph.planner is None else graph.planner.address
    return PLANNER_PORT if address is None else Address.parse(address).port or PLANNER_PORT


def _has_vllm(graph: Graph) -> bool:
    return any(role.engine == "vllm" for role in graph.roles.present().values())


def _delimiter(text: str) -> str:
    """Name an end of a here-document that no line of it is."""
    end = "GRAPH"
    while end in text.split("\n"):
        end += "_"
    return end


_HEAD = """\
set -euo pipefail

# What each node runs, the first one first.
parts=({parts})
# penstock, or how it is started here, such as: apptainer exec --nv penstock.sif penstock
read -r -a penstock <<<"${{PENSTOCK:-penstock}}"
# All nodes share a secret; KV on disk is found again by a later job with the same one.
if [[ -z "${{{secret}:-}}" ]]; then
  {secret}=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')
fi
export {secret}

# The job's directory is on a file system that all nodes have.
graph="$PWD/penstock-$SLURM_JOB_ID.yaml"
cat >"$graph" <<'{end}'
{graph}{end}

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
if ((${{#nodes[@]}} != ${{#parts[@]}})); then
  echo "penstock: the job has ${{#nodes[@]}} nodes, and the graph was rendered for ${{#parts[@]}}; leave --nodes to the script" >&2
  exit 2
fi
"""
_ADDRESSES = """\
first=(--set runtime.hub=tcp://0.0.0.0:{port} --set "runtime.advertise=${{nodes[0]}}")
others=(--join "tcp://${{nodes[0]}}:{port}")
"""
_NO_HUB = """\
first=()
others=()
"""
_PLANNER = """\
# The planner starts and ends workers on all nodes of the job.
first+=(--set "planner.address=tcp://0.0.0.0:{port}")
others+=(--set "planner.address=tcp://${{nodes[0]}}:{port}")
"""
_RUN = """\
pids=()
start() {{
  local node=$1
  shift
{group}  srun --nodes=1 --ntasks=1 --nodelist="$node" --cpu-bind=none --wait=0 \\
    {wrapper}"${{penstock[@]}}" up "$graph" "$@" &
  pids+=($!)
}}
stop() {{
  kill -TERM "${{pids[@]}}" 2>/dev/null || true
}}
trap stop TERM INT

start "${{nodes[0]}}" --run "${{parts[0]}}" ${{first[@]+"${{first[@]}}"}}
{await_hub}for ((i = 1; i < ${{#nodes[@]}}; i++)); do
  start "${{nodes[i]}}" --run "${{parts[i]}}" ${{others[@]+"${{others[@]}}"}}
done

# The deployment lives as long as its first node; what another one loses goes on at the rest.
# A signal ends `wait` early, so it is asked again until the process is gone.
while true; do
  status=0
  wait "${{pids[0]}}" || status=$?
  kill -0 "${{pids[0]}}" 2>/dev/null || break
done
stop
wait || true
rm -f "$graph"
exit "$status"
"""
_NIXL = """\
bash -c 'export VLLM_NIXL_SIDE_CHANNEL_HOST=$(hostname -I | cut -d" " -f1) && exec "$@"' penstock \\
    """
"""vLLM's connector is reached by the node's address."""
_GROUP = """\
  local i flags=()
  for i in "${!nodes[@]}"; do
    [[ ${nodes[i]} != "$node" ]] || read -r -a flags <<<"${groups[i]}"
  done
  set -- "$@" ${flags[@]+"${flags[@]}"}
"""
_AWAIT_HUB = """\
# This script runs on the first node, whose registry listens once the model is there.
until (exec 3<>/dev/tcp/127.0.0.1/{port}) 2>/dev/null; do
  kill -0 "${{pids[0]}}" 2>/dev/null || break
  sleep 1
done
"""
