"""Applies changed graphs to a deployment that runs, one after another."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from penstock.core.errors import ConfigError, PenstockError, Unavailable
from penstock.core.log import cause, get_logger
from penstock.core.types.instances import Role
from penstock.core.types.scaling_rules import conflict
from penstock.deploy.card import check_model, served_name
from penstock.deploy.control.messages import Difference, RolloutView
from penstock.deploy.supervisor.links import Links, LinkTemplate
from penstock.deploy.supervisor.local_part import LocalPart, roles_here
from penstock.deploy.supervisor.rollout import BY, Aim, Rollout
from penstock.deploy.supervisor.scale_file import ScaleFile
from penstock.deploy.supervisor.template import WorkerTemplate
from penstock.deploy.supervisor.worker_pool import WAIT_S_MAX, LocalWorkerPool
from penstock.graph import Graph, RoleSpec

ALL = "all"
_REPLACING = {"model", "context_length", "chat_template", "worker"}
"""Parts of a graph, besides roles, that only workers read."""
_AT_START = {
    "frontend": "frontends read it at their start",
    "router": "frontends read it at their start",
    "request_plane": "frontends and workers agree on it at their start",
    "runtime": "processes find each other by it from their start on",
    "tracing": "frontends read it at their start",
    "planner": "the planner reads it at its start",
    "slo": "the planner reads it at its start",
    "supervision": "the supervisor reads it at its start",
    "block_size": "the KV of all workers is in blocks of this size",
}
_OF_PODS = ("kubernetes", "frontend.kubernetes")
_NOT_HERE = "nothing here: pods of Kubernetes have it"
_TEXT_MAX = 48
_ABSENT = "-"
Roles = Mapping[Role, RoleSpec]


def differences(old: Graph, new: Graph, *, old_here: Roles, new_here: Roles) -> Iterator[Difference]:
    """Yield each field that differs, the graph's before the roles'.

    Args:
        old: the graph of the deployment that runs.
        new: the changed one.
        old_here: roles of `old` that this host runs, with their numbers of workers here.
        new_here: the same of `new`.
    """
    yield from _of_graph(old, new)
    yield from _of_regions(old, new)
    for role in Role:
        before, after = old_here.get(role), new_here.get(role)
        if before is None and after is None:
            if old.roles.present().get(role) != new.roles.present().get(role):
                yield _row(role, "", "", "", "nothing here: other hosts run this role")
        elif before is None or after is None:
            yield _whole_role(role, before, after, has_planner=old.planner is not None)
        else:
            yield from _of_role(role, before, after)


def _of_graph(old: Graph, new: Graph) -> Iterator[Difference]:
    before, after = (
        _flat(graph.model_dump(mode="json", exclude={"roles", "regions"})) for graph in (old, new)
    )
    if served_name(old) != served_name(new):
        yield _refused(
            ALL,
            "served_name",
            served_name(old),
            served_name(new),
            f"clients ask for {served_name(old)}; set served_name to that",
        )
    for path in _changed(before, after):
        top = path.partition(".")[0]
        values = before.get(path, _ABSENT), after.get(path, _ABSENT)
        if top == "served_name" or (top == "model" and _is_same_place(old.model, new.model)):
            continue
        if path.startswith(_OF_PODS):
            yield _row(ALL, path, *values, _NOT_HERE)
        elif top in _REPLACING and path != "worker.own_cores":
            yield _row(ALL, path, *values, "replace workers")
        else:
            yield _refused(ALL, path, *values, _AT_START.get(top, "it is read at the start"))


def _of_regions(old: Graph, new: Graph) -> Iterator[Difference]:
    """Yield the links that start, end or are replaced."""
    before, after = ({each.name: each for each in graph.regions} for graph in (old, new))
    for name in sorted({*before, *after}):
        was, is_now = before.get(name), after.get(name)
        if was == is_now:
            continue
        action = (
            "start its link" if was is None else "drain its link" if is_now is None else "replace its link"
        )
        old_urls, new_urls = (_ABSENT if each is None else ", ".join(each.urls) for each in (was, is_now))
        yield _row(ALL, f"regions.{name}", old_urls, new_urls, action)


def _of_role(role: Role, before: RoleSpec, after: RoleSpec) -> Iterator[Difference]:
    old, new = (_flat(spec.model_dump(mode="json")) for spec in (before, after))
    for path in _changed(old, new):
        values = old.get(path, _ABSENT), new.get(path, _ABSENT)
        if path == "replicas":
            count = after.replicas - before.replicas
            yield _row(role, path, *values, f"start {count}" if count > 0 else f"drain {-count}")
        elif path.startswith("kv.host") or (path == "replicas_max" and after.kv.host):
            yield _refused(role, path, *values, "memory of the host is laid out at the start")
        elif path == "replicas_max":
            yield _row(role, path, *values, "another bound of scaling")
        elif path.startswith("kubernetes"):
            yield _row(role, path, *values, _NOT_HERE)
        else:
            yield _row(role, path, *values, "replace workers")
    if after.kv.host and after.replicas > before.replicas_most:
        yield _refused(
            role,
            "replicas",
            before.replicas,
            after.replicas,
            f"memory of the host is laid out for {before.replicas_most} workers",
        )


def _whole_role(
    role: Role, before: RoleSpec | None, after: RoleSpec | None, *, has_planner: bool
) -> Difference:
    if has_planner:
        old, new = (_ABSENT if spec is None else spec.engine for spec in (before, after))
        return _refused(role, "", old, new, "the planner knows the roles of its start")
    if after is None:
        assert before is not None, "one of them is there"
        return _row(role, "", before.engine, _ABSENT, "drain all its workers")
    if after.kv.host:
        return _refused(
            role, "kv.host", _ABSENT, after.kv.host, "memory of the host is laid out at the start"
        )
    return _row(role, "", _ABSENT, after.engine, f"start {after.replicas}")


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    return sorted(path for path in {*before, *after} if before.get(path, _ABSENT) != after.get(path, _ABSENT))


def _flat(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Give the values of nested mappings by dotted path; a list is one value."""
    flat: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, dict) and value:
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _is_same_place(one: str, other: str) -> bool:
    paths = [Path(name).expanduser() for name in (one, other)]
    return all(path.is_dir() for path in paths) and paths[0].resolve() == paths[1].resolve()


def _row(role: str, field: str, old: object, new: object, action: str) -> Difference:
    return Difference(role=role, field=field, old=_text(old), new=_text(new), action=action)


def _refused(role: str, field: str, old: object, new: object, why: str) -> Difference:
    return Difference(role=role, field=field, old=_text(old), new=_text(new), refusal=why)


def _text(value: object) -> str:
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    text = " ".join(text.split())
    return text if len(text) <= _TEXT_MAX else f"{text[: _TEXT_MAX - 3]}..."


MakeLinks = Callable[[Graph], Awaitable[dict[str, LinkTemplate]]]
MakeTemplates = Callable[[Graph, Mapping[Role, RoleSpec]], Awaitable[dict[Role, WorkerTemplate]]]
_LINES_MAX = 10_000
_STOPPED = "stopped half-way, as the deployment stops; start it with the graph that it should have"
_log = get_logger()


class Applier:
    """Keeps the graph of a deployment, and changes the workers to those of another graph. One event loop owns it.

    Attributes:
        graph: of the deployment now.
        templates: what workers that start now are started with.
    """

    def __init__(
        self,
        graph: Graph,
        *,
        part: LocalPart,
        pool: LocalWorkerPool,
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
        """Salt of block hashes by template key, for the templates of running workers."""
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
        """Accept no more changes, and stop the rollout under way at its current step."""
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
        """Run a rollout. No failure of a rollout ends the deployment."""
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
