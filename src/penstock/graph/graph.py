"""The deployment graph: one object with all settings of a deployment.

Commands build it from flags, files hold it as YAML, programs build it in Python: all get the same checks.
"""

import re
import runpy
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Self

import pydantic

from penstock.core.config import Config, config_error, wrong
from penstock.core.document import empty_section, parse_yaml
from penstock.core.errors import ConfigError
from penstock.core.types.instances import Location
from penstock.frontend.config import FrontendConfig
from penstock.graph.capacities import check_planner
from penstock.graph.kubernetes import KubernetesSpec
from penstock.graph.overrides import Overrides
from penstock.graph.partners import check_partners, check_transfer
from penstock.graph.regions import REGIONS_MAX, RegionSpec, check_regions
from penstock.graph.role import Roles, RoleSpec
from penstock.graph.runtime import RuntimeSpec
from penstock.perf.profile import Profile
from penstock.planner.config import PlannerConfig
from penstock.router.config import RouterConfig
from penstock.runtime.config import PlaneConfig, TracingConfig
from penstock.worker.config import WorkerConfig


class Slo(Config):
    """Latency targets: `percentile` % of requests must meet both."""

    ttft_s: float = pydantic.Field(default=2.0, gt=0)
    """Seconds from a request's arrival to its first token."""
    itl_s: float = pydantic.Field(default=0.1, gt=0)
    """Mean seconds between two tokens of a stream."""
    percentile: float = pydantic.Field(default=90.0, gt=0, lt=100)
    """Share of requests that must meet the targets, in percent."""


class Supervision(Config):
    """When the processes of one machine are killed and restarted."""

    start_timeout_s: float = pydantic.Field(default=600.0, gt=0)
    """Longest seconds from a process's start until it is ready."""
    liveness_timeout_s: float = pydantic.Field(default=15.0, gt=0)
    """Longest seconds without a heartbeat of a ready process, whose event loop then hangs; after that it is killed and restarted."""
    step_timeout_s: float = pydantic.Field(default=300.0, gt=0)
    """Longest seconds in which a worker's engine with requests finishes no step; after that it is killed and restarted. Must exceed its longest step."""
    close_timeout_s: float = pydantic.Field(default=15.0, gt=0)
    """Longest seconds that a worker's engine takes to close; after that its processes are killed."""
    restart_delay_s: float = pydantic.Field(default=0.2, gt=0)
    """Seconds before the first restart; doubled for each consecutive one."""
    restart_delay_max_s: float = pydantic.Field(default=10.0, gt=0)
    """The longest delay before a restart, in seconds."""
    healthy_after_s: float = pydantic.Field(default=30.0, gt=0)
    """Seconds of service after which earlier failures are forgotten."""
    spare_processes: int = pydantic.Field(default=1, ge=0, le=64)
    """Spare processes that have imported a worker's modules and replace a failed one; about 300 MB each with the paged engine. 0: a restart takes as long as a start."""
    failed_starts_max: int = pydantic.Field(default=5, ge=1)
    """Consecutive failed starts after which a process is given up."""


class FrontendSpec(FrontendConfig):
    """The OpenAI-compatible server: one port, shared by one or more processes."""

    processes: int = pydantic.Field(default=1, ge=1, le=64)
    """Processes that share the port."""
    kubernetes: KubernetesSpec | None = None
    """What the frontends' pods get in Kubernetes beside what the graph's `kubernetes` gives all pods."""


DEMO_MODEL = "demo"
"""Model name of the small model in the package."""


class Graph(Config):
    """A deployment of one model."""

    name: str = "default"
    """Name of the deployment's state on disk; deployments with one name share their block-hash key."""
    model: str = pydantic.Field(min_length=1)
    """A directory with a checkpoint, a name on the Hugging Face hub, or `demo` for the one in the package."""
    served_name: str | None = None
    """Model name for clients; None is the hub name, or the directory's."""
    block_size: int = pydantic.Field(default=16, ge=1, le=512)
    """Tokens in a KV block."""
    context_length: int | None = pydantic.Field(default=None, ge=1)
    """Longest prompt plus output of a request, in tokens; None is the model's own limit."""
    chat_template: str | None = None
    """Jinja in the place of the model's chat templates: a file's path, or the text itself; None takes the model's."""
    frontend: FrontendSpec = FrontendSpec()
    """The OpenAI-compatible server."""
    router: RouterConfig = RouterConfig()
    """Routing, in each frontend process."""
    roles: Roles = Roles(aggregated=RoleSpec())
    """The workers by role."""
    regions: tuple[RegionSpec, ...] = pydantic.Field(default=(), max_length=REGIONS_MAX)
    """Other regions: deployments of their own, to which frontends of this one give requests where that is faster."""
    worker: WorkerConfig = WorkerConfig()
    """Load reports, KV transfer and draining of every worker."""
    slo: Slo | None = None
    """Latency targets; None for no targets."""
    planner: PlannerConfig | None = None
    """Changes the number and roles of the workers by demand, so that `slo` holds; None leaves them as they are."""
    runtime: RuntimeSpec = RuntimeSpec()
    """How processes find and reach each other, on one host or several."""
    request_plane: PlaneConfig = PlaneConfig()
    """Connections between frontends and workers."""
    supervision: Supervision = Supervision()
    """Timeouts and restarts of processes."""
    tracing: TracingConfig | None = None
    """OpenTelemetry traces of requests; None: none are made."""
    kubernetes: KubernetesSpec | None = None
    """What all pods get in Kubernetes beside what Penstock gives them (docs/kubernetes.md)."""

    @pydantic.field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", name):
            raise wrong(
                f"must be up to 63 letters, digits, '.', '_' or '-', the first a letter or digit, got {name!r}"
            )
        return name

    @pydantic.field_validator("roles")
    @classmethod
    def _check_roles(cls, roles: Roles) -> Roles:
        check_partners(roles)
        return roles

    @pydantic.model_validator(mode="after")
    def _check_transfer(self) -> Self:
        if self.roles.prefill is not None:
            check_transfer(self.worker.kv_transfer.transfer)
        return self

    @pydantic.model_validator(mode="after")
    def _check_planner(self) -> Self:
        if self.planner is not None:
            check_planner(self.planner, self.roles)
            if self.runtime.spans_hosts and self.planner.address is None:
                raise wrong(
                    "planner.address: runtime spans several hosts, whose supervisors connect to the planner; set it to the address"
                    " of the host that runs it, as tcp://10.0.0.1:7410"
                )
            if self.planner.scales == "pods" and self.runtime.discovery == "local":
                raise wrong(
                    "planner.scales: pods: the workers are not in pods; leave it out, or apply a PenstockGraph"
                )
            if self.planner.address is not None and not self.runtime.spans_hosts:
                raise wrong(
                    f"planner.address: {self.planner.address}: all is on one host; leave it out, or set runtime.hub or"
                    " runtime.discovery"
                )
            for field in ("hub", "join"):
                if self.planner.address is not None and self.planner.address == getattr(self.runtime, field):
                    raise wrong(
                        f"planner.address: {self.planner.address} is runtime.{field} too, where the registry listens; give the planner"
                        " another port"
                    )
        return self

    @pydantic.model_validator(mode="after")
    def _check_links(self) -> Self:
        check_regions(self.regions, self.router.location.region)
        return self

    @pydantic.model_validator(mode="after")
    def _check_regions(self) -> Self:
        """Reject a topology pair with an unused region if the name looks like a typo of a used region without this pair.

        Other unused regions are allowed: a table may cover more regions than the deployment.
        """
        places = [
            place for role in self.roles.present().values() for place in role.locations or (Location(),)
        ]
        if not all(place.region for place in places):
            return self  # processes may get their region from the environment
        regions = {place.region for place in (*places, self.router.location) if place.region}
        regions |= {region.name for region in self.regions}
        pairs = [{pair.one, pair.other} for pair in self.router.topology.pairs]
        for index, pair in enumerate(pairs):
            for unknown in pair - regions:
                lacking = [region for region in regions - pair if pair - {unknown} | {region} not in pairs]
                if meant := get_close_matches(unknown, lacking, n=1):
                    raise wrong(
                        f"router.topology.pairs.{index}: nobody is in region {unknown!r}; roles.*.locations and"
                        f" router.location name {', '.join(sorted(regions))}; did you mean {meant[0]!r}?"
                    )
        return self


def load(path: str | Path, overrides: Overrides | None = None) -> Graph:
    """Read a graph from a YAML file, or from a Python file that sets `graph`; paths of profiles and of the chat template are relative to the file.

    Args:
        path: a `.py` file is run, any other is YAML or JSON.
        overrides: values set by flags.

    Raises:
        ConfigError: one line per mistake, `graph.yaml: roles.decode.replicas: must be >= 0, got -1`.
    """
    path = Path(path)
    source = str(path)
    if path.suffix == ".py":
        graph = _run_python(path)
        if overrides:
            data = graph.model_dump(mode="json", exclude_unset=True)
            return build(data, overrides, source, directory=path.parent)
        return _with_files(graph, path.parent, Overrides(), source)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{source}: {(error.strerror or str(error)).lower()}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{source}: not UTF-8 text (byte {error.start}); a graph is YAML") from error
    data = parse_yaml(text, source=source)
    if not isinstance(data, dict):
        empty = "is empty; " if data is None else ""
        raise ConfigError(f"{source}: {empty}must be a mapping, with at least a `model`")
    if unfilled := empty_section(text, Graph):
        section = ".".join(map(str, unfilled))
        raise ConfigError(
            f"{source}: {section}: is empty; must be a mapping: give its fields, `{unfilled[-1]}: {{}}` for their defaults, or leave it out"
        )
    return build(data, overrides, source, directory=path.parent)


def build(
    data: dict[str, Any],
    overrides: Overrides | None = None,
    source: str = "graph",
    *,
    directory: Path = Path(),
) -> Graph:
    """Build a graph from plain data and flags; paths of profiles and of the chat template are relative to `directory`.

    Raises:
        ConfigError: one line per mistake, each with its flag or `source`.
    """
    changes = overrides or Overrides()
    graph = Graph.parse(changes.apply(data), source=lambda path: changes.source_of(path, source))
    return _with_files(graph, directory, changes, source)


def _with_files(graph: Graph, directory: Path, overrides: Overrides, source: str) -> Graph:
    """Read the chat template, check the roles' profiles and make their paths absolute, since workers run in other directories.

    Raises:
        ConfigError: a file cannot be read.
    """
    if graph.chat_template is not None and "{" not in graph.chat_template:
        path = (directory / Path(graph.chat_template).expanduser()).resolve()
        where = f"{overrides.source_of(('chat_template',), source)}: chat_template: {path}"
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{where}: {(error.strerror or str(error)).lower()}") from error
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"{where}: not UTF-8 text (byte {error.start}); a chat template is Jinja"
            ) from error
        if "{" not in text:
            raise ConfigError(f"{where}: has no Jinja; expected a chat template, such as {{{{ messages }}}}")
        graph = graph.model_copy(update={"chat_template": text})
    changed = {}
    for name, role in graph.roles.present().items():
        if role.profile is None:
            continue
        profile = (directory / Path(role.profile).expanduser()).resolve()
        try:
            Profile.load(profile)
        except ConfigError as error:
            where = overrides.source_of(("roles", name.value, "profile"), source)
            raise ConfigError(f"{where}: roles.{name.value}.profile: {error.message}") from error
        changed[name.value] = role.model_copy(update={"profile": str(profile)})
    return graph.model_copy(update={"roles": graph.roles.model_copy(update=changed)}) if changed else graph


def _run_python(path: Path) -> Graph:
    try:
        names = runpy.run_path(str(path))
    except pydantic.ValidationError as error:
        raise config_error(Graph, error, str(path)) from error
    except OSError as error:
        raise ConfigError(f"{path}: {(error.strerror or str(error)).lower()}") from error
    except SystemExit as error:
        raise ConfigError(f"{path}: ended with sys.exit({error.code!r}); it must set `graph`") from error
    except Exception as error:
        raise ConfigError(f"{path}: {type(error).__name__}: {' '.join(str(error).split())}") from error
    if "graph" not in names:
        raise ConfigError(f"{path}: does not set `graph`; it must set it to a penstock.graph.Graph")
    graph = names["graph"]
    if not isinstance(graph, Graph):
        raise ConfigError(f"{path}: must set `graph` to a penstock.graph.Graph, got {type(graph).__name__}")
    return graph
