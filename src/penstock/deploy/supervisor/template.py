"""What the workers of a role are started with."""

import asyncio
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import msgspec

from penstock.core.ids import new_worker_id
from penstock.core.types.instances import ModelCard, Role
from penstock.deploy.card import make_card, open_checkpoint
from penstock.deploy.messages import ProcessSettings, WorkerJob
from penstock.deploy.supervisor.local_part import expect_same_blocks
from penstock.deploy.supervisor.worker_pool import PoolWorker
from penstock.engine.paged.checkpoint import Checkpoint
from penstock.graph import Graph, RoleSpec
from penstock.graph.regions import link_role
from penstock.kv.host_arena import HostPart

_NOT_OF_A_WORKER = {"replicas", "replicas_max", "kubernetes"}
_KEY_BYTES = 8


@dataclass(frozen=True, slots=True)
class WorkerTemplate:
    """What workers of one role are started with. A worker keeps its template, also when its process is started again.

    Attributes:
        spec: the role.
        card: the model as they serve it.
        model_dir: its files.
        common: what all processes share, with the whole graph.
        key: workers whose templates have equal keys need not replace each other.
    """

    spec: RoleSpec
    card: ModelCard
    model_dir: str
    common: ProcessSettings
    key: str

    @classmethod
    def of(
        cls, graph: Graph, spec: RoleSpec, *, card: ModelCard, model_dir: str, common: ProcessSettings
    ) -> Self:
        """Make the template of a role of `graph`."""
        parts = (
            spec.model_dump_json(exclude=_NOT_OF_A_WORKER),
            graph.worker.model_dump_json(),
            repr((graph.context_length, graph.block_size, card.name, card.salt, model_dir)),
        )
        digest = hashlib.blake2b("\n".join(parts).encode(), digest_size=_KEY_BYTES)
        common = msgspec.structs.replace(common, graph_json=graph.model_dump_json())
        return cls(spec=spec, card=card, model_dir=model_dir, common=common, key=digest.hexdigest())

    def job(self, worker: PoolWorker, host_part: HostPart | None) -> WorkerJob:
        """Make the job of a worker's next process."""
        return WorkerJob(
            worker_id=new_worker_id(),
            role=worker.role,
            card=self.card,
            model_dir=self.model_dir,
            index=worker.index,
            device=worker.devices[0] if worker.devices else 0,
            core=worker.core,
            ports=worker.ports,
            adapters=self.spec.adapters_of(worker.index),
            host_part=host_part,
            home=worker.home,
        )


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A graph's model on this host.

    Attributes:
        checkpoint: its files.
        cards: the model card of each role.
    """

    checkpoint: Checkpoint
    cards: dict[Role, ModelCard]

    @property
    def path(self) -> Path:
        """The directory."""
        return self.checkpoint.path

    def link_card(self, graph: Graph) -> ModelCard:
        """Make the card of links to other regions, which read no weights; by its salt they tell whether prefixes there are those of workers here."""
        card = make_card(self.checkpoint, graph, link_role(graph.regions[0], here=""))
        own = next((own for role, own in self.cards.items() if role is not Role.PREFILL), card)
        return msgspec.structs.replace(card, salt=own.salt)

    def templates(
        self, graph: Graph, roles: Mapping[Role, RoleSpec], common: ProcessSettings
    ) -> dict[Role, WorkerTemplate]:
        """Make the templates of the roles."""
        return {
            role: WorkerTemplate.of(
                graph, spec, card=self.cards[role], model_dir=str(self.path), common=common
            )
            for role, spec in roles.items()
        }


async def read_model(graph: Graph, roles: Mapping[Role, RoleSpec]) -> OpenedModel:
    """Open a graph's model and make the cards of these roles; a hub name is downloaded.

    Raises:
        ConfigError: the model does not exist or lacks a file, or the roles' KV is not interchangeable.
    """
    checkpoint = await asyncio.to_thread(open_checkpoint, graph, roles)
    cards = {
        role: await asyncio.to_thread(make_card, checkpoint, graph, spec) for role, spec in roles.items()
    }
    if cards:
        expect_same_blocks(cards)
    return OpenedModel(checkpoint, cards)
