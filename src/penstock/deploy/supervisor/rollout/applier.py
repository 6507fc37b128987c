"""Applies changed graphs to a deployment that runs, one after another."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress

from penstock.core.errors import ConfigError, PenstockError, Unavailable
from penstock.core.log import cause, get_logger
from penstock.core.types.instances import Role
from penstock.deploy.card import check_model
from penstock.deploy.control.messages import Difference, RolloutView
from penstock.deploy.supervisor.links.links import Links, LinkTemplate
from penstock.deploy.supervisor.local_part import LocalPart, roles_here
from penstock.deploy.supervisor.rollout.differences import ALL, differences
from penstock.deploy.supervisor.rollout.rollout import BY, Aim, Rollout
from penstock.deploy.supervisor.scaling.retirement import conflict
from penstock.deploy.supervisor.scaling.scale_file import ScaleFile
from penstock.deploy.supervisor.scaling.template import WorkerTemplate
from penstock.deploy.supervisor.scaling.worker_pool import WAIT_S_MAX, WorkerPool
from penstock.graph import Graph, RoleSpec

MakeLinks = Callable[[Graph], Awaitable[dict[str, LinkTemplate]]]
MakeTemplates = Callable[[Graph, Mapping[Role, RoleSpec]], Awaitable[dict[Role, WorkerTemplate]]]
_LINES_MAX = 10_000
_STOPPED = "stopped half-way, as the deployment stops; start it with the graph that it should have"
_log = get_logger()


class Applier:
    """Keeps the graph of a deployment, and changes its workers to another. One event loop owns it.

    Attributes:
        graph: of the deployment now.
        templates: what workers that start now are started with.
    """

    def __init__(
        self,
        graph: Graph,
        *,
        part: LocalPart,
        pool: WorkerPool,
        make_templates: MakeTemplates,
        links: Links,
        make_links: MakeLinks,
        say: Callable[[str, str, str], None],
    ) -> None:
        """Have the graph that the deployment starts with; `open` lets others apply.

        Args:
            graph: the deployment.
            part: what of it this host runs.
            pool: its workers here.
            make_templates: reads the model and makes the templates of roles.
            links: to other regions.
            make_links: makes the templates of links.
            say: called with (name, state, detail) at each step.
        """
        self.graph = graph
        self.templates: dict[Role, WorkerTemplate] = {}
        self._part = part
        self._pool = pool
        self._make_templates = make_templates
        self._links = links
        self._make_links = make_links
        self._tell = say
        self._salts: dict[str, bytes] = {}
        """Salt of block hashes by the key of a template, of those that workers have."""
        self._file: ScaleFile | None = None
        self._group: asyncio.TaskGroup | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_busy = False
        self._view = RolloutView(number=0)
        self._lines: list[str] = []
        self._changed: set[asyncio.Future[None]] = set()

    def open(self, group: asyncio.TaskGroup, file: ScaleFile) -> None:
        """Accept changes, which run in `group`; `file` remembers the workers."""
        self._group, self._file = group, file

    def close(self) -> None:
        """Accept no more changes, and end the one that is under way where it is."""
        self._group = None
        if self._task is not None:
            self._task.cancel()

    def use(self, templates: dict[Role, WorkerTemplate]) -> None:
        """Start workers by these templates from now on."""
        self.templates = templates
        kept = {worker.template for worker in self._pool.workers}
        self._salts = {key: salt for key, salt in self._salts.items() if key in kept}
        self._salts |= {each.key: each.card.salt for each in templates.values()}
        self._pool.define({role: each.spec for role, each in templates.items()})

    async def apply(self, graph_json: str, *, dry_run: bool) -> tuple[Difference, ...]:
        """Begin to change the deployment to another graph; returns what differs. `dry_run` changes nothing.

        Raises:
            RequestError: another change is under way (409), or there is no room for a new worker.
            ConfigError: the graph is wrong, or its model is.
        """
        if self._is_busy:
            raise conflict(
                f"{BY} is under way already; wait until it has ended, penstock ps shows the workers"
            )
        if self._group is None:
            raise conflict("the deployment is about to start or to stop; apply it once it is ready")
        self._is_busy = True
        begun = False
        try:
            try:
                graph = Graph.model_validate_json(graph_json)
            except ValueError as error:
                raise ConfigError(f"no graph of this version: {error}") from error
            check_model(graph)
            roles = roles_here(self._part, graph)
            before = self._part.of(self.graph.roles.present())
            found = [*differences(self.graph, graph, old_here=before, new_here=roles)]
            if any(each.refusal for each in found):
                return tuple(found)
            if not roles and before:
                raise ConfigError(
                    "roles: none of them runs here any more; penstock down ends this host's part"
                )
            templates = await self._make_templates(graph, roles)
            self._check_nodes(templates)
            links = await self._make_links(graph)
            rollout, found = self._plan(graph, before, templates, found)
            rollout.check()
            if found and not dry_run:
                begun = True
                self._begin(graph, templates, links, rollout)
            return tuple(found)
        finally:
            if not begun:
                self._is_busy = False

    def _check_nodes(self, templates: dict[Role, WorkerTemplate]) -> None:
        """Check that no worker of several nodes would be replaced: its other nodes keep what they were started with.

        Raises:
            ConfigError: one would.
        """
        for role, new in templates.items():
            old = self.templates.get(role)
            nodes = max(new.spec.nodes, 1 if old is None else old.spec.nodes)
            if nodes > 1 and old is not None and old.key != new.key:
                raise ConfigError(
                    f"roles.{role}: a worker of {nodes} nodes would be replaced, and its other nodes keep the graph that they were started"
                    " with; end penstock up on all of its nodes, and start it with the new graph"
                )

    async def watch(self, after: int) -> RolloutView:
        """Describe the last rollout, once it has more lines than `after` or has ended."""
        if not self._view.is_over and len(self._lines) <= after:
            changed = asyncio.get_running_loop().create_future()
            self._changed.add(changed)
            try:
                with suppress(TimeoutError):
                    async with asyncio.timeout(WAIT_S_MAX):
                        await changed
            finally:
                self._changed.discard(changed)
        return RolloutView(
            number=self._view.number,
            lines=tuple(self._lines),
            is_over=self._view.is_over,
            error=self._view.error,
        )

    def _plan(
        self,
        graph: Graph,
        before: Mapping[Role, RoleSpec],
        templates: Mapping[Role, WorkerTemplate],
        found: list[Difference],
    ) -> tuple[Rollout, list[Difference]]:
        """Make the rollout, and say of each difference what it does."""
        active = [worker for worker in self._pool.workers if not worker.is_draining]
        aims: dict[Role, Aim] = {}
        counts: dict[str, str] = {}
        for role, template in templates.items():
            have, old = sum(worker.home is role for worker in active), before.get(role)
            keeps = old is not None and old.replicas == template.spec.replicas
            aims[role] = Aim(template.spec, have if keeps else template.spec.replicas, template.key)
            counts[role] = _describe_count(have, template.spec.replicas)
        outdated = [w for w in active if w.home in aims and w.template != aims[w.home].template]
        is_revision = any(self._salts.get(w.template) != templates[w.home].card.salt for w in outdated)
        rollout = Rollout(
            self._pool,
            aims,
            is_revision=is_revision,
            drain_s=graph.frontend.request_timeout_s,
            starts_max=graph.supervision.failed_starts_max,
            say=self._note,
        )
        shown = [
            Difference(
                role=each.role,
                field=each.field,
                old=each.old,
                new=each.new,
                action=counts.get(each.role, each.action)
                if each.field == "replicas"
                else f"{each.action} {rollout.order([role for role in aims if each.role in {role, ALL}])}"
                if each.action == "replace workers"
                else each.action,
            )
            for each in found
        ]
        if outdated and not any(each.action == "replace workers" for each in found):
            what = "model revision" if is_revision else "workers"
            names = ", ".join(worker.name for worker in outdated)
            action = f"replace workers {rollout.order(aims)}"
            shown.append(Difference(role=ALL, field=what, old=names, new="", action=action))
        return rollout, shown

    def _begin(
        self,
        graph: Graph,
        templates: dict[Role, WorkerTemplate],
        links: dict[str, LinkTemplate],
        rollout: Rollout,
    ) -> None:
        assert self._group is not None, "open"
        self._lines = []
        self._view = RolloutView(number=self._view.number + 1, is_over=False)
        self._task = self._group.create_task(self._run(graph, templates, links, rollout), name="apply")
        number = self._view.number

        def ended(_: asyncio.Task[None]) -> None:
            if self._view.number == number and not self._view.is_over:  # cancelled before its first step
                self._is_busy = False
                self._end(Unavailable(_STOPPED))

        self._task.add_done_callback(ended)

    async def _run(
        self,
        graph: Graph,
        templates: dict[Role, WorkerTemplate],
        links: dict[str, LinkTemplate],
        rollout: Rollout,
    ) -> None:
        former = self.templates
        error: PenstockError | None = None
        self._pool.hold(BY)
        try:
            self.use(former | templates)
            error = await self._outcome(rollout)
            if error is None or rollout.has_switched:
                self.graph = graph
                self.use(templates)
                self._links.change(links)
                if self._file is not None:
                    self._file.declare({role: each.spec.replicas for role, each in templates.items()})
            else:
                self.use(former)
                await rollout.restore(former)
        except asyncio.CancelledError:
            error = error or Unavailable(_STOPPED)
            raise
        finally:
            self._pool.let_go()
            self._is_busy = False
            self._end(error)

    async def _outcome(self, rollout: Rollout) -> PenstockError | None:
        """Run a rollout; whatever fails in it must not end the deployment."""
        try:
            await rollout.run()
        except PenstockError as error:
            return error
        except Exception as error:  # noqa: BLE001 - see above
            _log.error("apply_crashed", **cause(error))
            return PenstockError(f"the supervisor failed: {error!r}")
        return None

    def _end(self, error: PenstockError | None) -> None:
        if error is None:
            self._note("done")
        else:
            _log.warning("apply_failed", error=error.message)
            self._note(f"failed: {error.message}")
        self._view = RolloutView(
            number=self._view.number, error=None if error is None else error.to_info(), is_over=True
        )
        self._wake()

    def _note(self, line: str) -> None:
        if len(self._lines) < _LINES_MAX:
            self._lines.append(line)
        self._tell("apply", "rolls", line)
        self._wake()

    def _wake(self) -> None:
        for changed in self._changed:
            if not changed.done():
                changed.set_result(None)


def _describe_count(have: int, wanted: int) -> str:
    """Say what a changed `replicas` does to the workers that run; a planner or `penstock scale` may have changed their number."""
    if have == wanted:
        return f"{have} run already"
    return f"start {wanted - have}" if wanted > have else f"drain {have - wanted}"
