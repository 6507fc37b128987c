"""The links to other regions: each is a worker process of its own, which the deployment can do without."""

import asyncio
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from penstock.core.errors import ConfigError
from penstock.core.ids import new_worker_id
from penstock.core.types.instances import ModelCard, ReplicaState, Role
from penstock.deploy.control.messages import ProcessView
from penstock.deploy.identity import location_here
from penstock.deploy.messages import ProcessSettings, WorkerJob
from penstock.deploy.supervisor.member import ProcessMember
from penstock.deploy.supervisor.template import OpenedModel
from penstock.engine.openai.config import RegionConfig
from penstock.graph import Graph
from penstock.graph.regions import RegionSpec

_KEY_BYTES = 8


@dataclass(frozen=True, slots=True)
class LinkTemplate:
    """What a link is started with. A link is replaced only by one whose template has another key."""

    region: str
    card: ModelCard
    model_dir: str
    common: ProcessSettings
    key: str

    @classmethod
    def of(
        cls, graph: Graph, region: RegionSpec, *, card: ModelCard, model_dir: str, common: ProcessSettings
    ) -> "LinkTemplate":
        """Make the template of the link to a region of `graph`."""
        parts = (
            region.model_dump_json(),
            repr((graph.context_length, graph.block_size, card.name, card.salt)),
        )
        key = hashlib.blake2b("\n".join(parts).encode(), digest_size=_KEY_BYTES).hexdigest()
        common = msgspec.structs.replace(common, graph_json=graph.model_dump_json())
        return cls(region.name, card, model_dir, common, key)

    def job(self) -> WorkerJob:
        """Make the job of the link's next process."""
        return WorkerJob(
            worker_id=new_worker_id(),
            role=Role.AGGREGATED,
            card=self.card,
            model_dir=self.model_dir,
            region=self.region,
        )


MakeLink = Callable[[str, LinkTemplate], ProcessMember]
"""(name, template) -> a member that is not running yet."""


@dataclass(slots=True, eq=False)
class _Link:
    template: LinkTemplate
    member: ProcessMember
    task: asyncio.Task[None] | None = None


class Links:
    """The links of this host. One event loop owns it. A link to a region that cannot be reached tries again, and ends nothing."""

    def __init__(self, make: MakeLink) -> None:
        """Have no links until `change`; `make` makes the process member of a link."""
        self._make = make
        self._links: dict[str, _Link] = {}
        self._leaving: set[_Link] = set()
        self._group: asyncio.TaskGroup | None = None

    @property
    def members(self) -> list[ProcessMember]:
        return [link.member for link in (*self._links.values(), *self._leaving)]

    def start(self, group: asyncio.TaskGroup) -> None:
        """Start the processes in `group`."""
        self._group = group
        for link in self._links.values():
            self._run(link)

    def change(self, templates: Mapping[str, LinkTemplate]) -> None:
        """Start the links of these regions, replace links whose template has another key, and drain the links of other regions."""
        for region, link in tuple(self._links.items()):
            wanted = templates.get(region)
            if wanted is None or wanted.key != link.template.key:
                self._let_go(region)
        for region, template in templates.items():
            if region not in self._links:
                link = self._links[region] = _Link(template, self._make(f"link-{region}", template))
                link.member.may_give_up = link.member.may_refuse = lambda: False
                if self._group is not None:
                    self._run(link)

    async def drain(self, patience_s: float) -> None:
        """Let the links finish their requests; after `patience_s` kill them."""
        for region in tuple(self._links):
            self._let_go(region)
        tasks = [link.task for link in self._leaving if link.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=patience_s)
        for link in self._leaving:
            link.member.kill()

    def processes(self) -> list[ProcessView]:
        """Describe their processes."""
        now_s = asyncio.get_running_loop().time()
        return [
            ProcessView(
                name=link.member.name,
                pid=link.member.pid,
                state=ReplicaState.FAILED if link.member.problem else link.member.state,
                phase=link.member.problem or link.member.phase,
                age_s=link.member.age_s(now_s),
                region=link.template.region,
            )
            for link in (*self._links.values(), *self._leaving)
        ]

    def _run(self, link: _Link) -> None:
        assert self._group is not None, "started"
        link.task = self._group.create_task(link.member.run(), name=link.member.name)

    def _let_go(self, region: str) -> None:
        link = self._links.pop(region)
        link.member.stop()
        if link.task is not None:
            self._leaving.add(link)
            link.task.add_done_callback(lambda _: self._leaving.discard(link))


def check_links(graph: Graph) -> None:
    """Check what the graph says of other regions, before anything starts.

    Raises:
        ConfigError: the own region is not known, or is one of them, or a file cannot be read.
    """
    if not graph.regions:
        return
    here = location_here(graph.router.location).region
    if not here:
        raise ConfigError(
            "regions: this deployment's own region is not known; set router.location.region, or PENSTOCK_REGION"
        )
    for index, region in enumerate(graph.regions):
        if region.name == here:
            raise ConfigError(
                f"regions.{index}.name: {here!r} is this deployment's own region; name other regions alone"
            )
        check_files(region, f"regions.{index}")


def check_files(region: RegionConfig, place: str) -> None:
    """Read a region's key and certificates.

    Raises:
        ConfigError: one cannot be read.
    """
    try:
        region.server().api_key()
    except ConfigError as error:
        raise ConfigError(f"{place}.{error.message.removeprefix('engine openai: ')}") from error
    if region.tls is not None:
        region.tls.context(f"{place}.tls")


def link_templates(graph: Graph, model: OpenedModel, common: ProcessSettings) -> dict[str, LinkTemplate]:
    """Make the templates of the graph's links, by region."""
    return {
        region.name: LinkTemplate.of(
            graph, region, card=model.link_card(graph), model_dir=str(model.path), common=common
        )
        for region in graph.regions
    }
