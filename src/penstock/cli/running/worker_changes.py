"""`penstock scale`, `penstock role`, `penstock sleep` and `penstock wake`."""

import argparse
from typing import Any

from penstock.cli.arguments.flags import add_deployment, add_frontend, frontend_of
from penstock.core.errors import ConfigError


def add(commands: Any) -> None:
    """Register the subcommands."""
    _add_scale(commands)
    _add_role(commands)
    _add_sleep(commands)


def _add_scale(commands: Any) -> None:
    parser = commands.add_parser(
        "scale",
        help="show or change how many workers a role has",
        description="Show the workers of a deployment that runs on this machine, or change how many a role has. Added workers"
        " start while the others serve; retired ones finish or migrate their requests first. See docs/planner.md.",
    )
    parser.add_argument("role", nargs="?", metavar="ROLE", help="prefill, decode or aggregated; without, all")
    parser.add_argument("count", nargs="?", metavar="N", help="its workers from now on; without, shows them")
    add_deployment(parser, has_url=True)
    parser.add_argument(
        "--no-wait", action="store_true", help="do not wait until workers are ready or have ended"
    )
    parser.set_defaults(run=_run_scale)


def _add_role(commands: Any) -> None:
    parser = commands.add_parser(
        "role",
        help="change the role of a running worker",
        description="Change a running worker's role to prefill, decode or aggregated without loading the model again: it drains"
        " within worker.drain_timeout_s and registers anew. See docs/disaggregation.md.",
    )
    parser.add_argument("worker", metavar="WORKER", help="its name in GET /admin/workers, such as prefill-1")
    parser.add_argument("role", metavar="ROLE", help="prefill, decode or aggregated")
    add_frontend(parser)
    parser.set_defaults(run=_run_role)


def _add_sleep(commands: Any) -> None:
    parser = commands.add_parser(
        "sleep",
        help="have a running worker give up its memory",
        description="Have a running worker drain within worker.drain_timeout_s, give up the memory of its KV cache and weights,"
        " and take no requests until `penstock wake`. See docs/engines.md.",
    )
    _add_worker(parser)
    parser.add_argument(
        "--level",
        type=int,
        default=1,
        metavar="N",
        help="1: weights go to host memory (default); 2: weights are dropped, and read again on waking",
    )
    parser.set_defaults(run=_run_sleep)
    parser = commands.add_parser(
        "wake",
        help="wake a worker that sleeps",
        description="Have a worker that sleeps take its memory and requests again. See docs/engines.md.",
    )
    _add_worker(parser)
    parser.set_defaults(run=_run_wake)


def _run_scale(options: argparse.Namespace) -> int:
    from penstock.core.config import nearest  # noqa: PLC0415
    from penstock.core.types.instances import Role  # noqa: PLC0415
    from penstock.deploy.commands.scale import run_scale  # noqa: PLC0415

    known = [role.value for role in Role]
    if options.role is not None and options.role not in known:
        region, slash, role = options.role.removeprefix("link-").partition("/")
        if slash or region != options.role:
            role = role if role in known else "ROLE"
            raise ConfigError(
                f"ROLE: {options.role!r} is of region {region!r}, a deployment of its own that nobody scales from here; run"
                f" penstock scale {role} {options.count or 'N'} on one of its hosts"
            )
        raise ConfigError(f"ROLE: unknown {options.role!r}{nearest(options.role, known)}")
    if options.count is not None and not (options.count.isascii() and options.count.isdecimal()):
        raise ConfigError(f"N: must be a number of workers >= 0, got {options.count!r}")
    run_scale(
        None if options.role is None else Role(options.role),
        None if options.count is None else int(options.count),
        name=options.name,
        url=options.url,
        part=options.part,
        wait=not options.no_wait,
    )
    return 0


def _run_role(options: argparse.Namespace) -> int:
    from penstock.core.config import nearest  # noqa: PLC0415
    from penstock.core.types.instances import Role  # noqa: PLC0415
    from penstock.deploy.commands.worker_changes import run_role  # noqa: PLC0415

    known = [role.value for role in Role]
    if options.role not in known:
        raise ConfigError(f"ROLE: unknown {options.role!r}{nearest(options.role, known)}")
    run_role(frontend_of(options), options.worker, Role(options.role))
    return 0


def _add_worker(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("worker", metavar="WORKER", help="its name in GET /admin/workers, such as worker-1")
    add_frontend(parser)


def _run_sleep(options: argparse.Namespace) -> int:
    from penstock.deploy.commands.worker_changes import run_sleep  # noqa: PLC0415

    run_sleep(frontend_of(options), options.worker, options.level)
    return 0


def _run_wake(options: argparse.Namespace) -> int:
    from penstock.deploy.commands.worker_changes import run_wake  # noqa: PLC0415

    run_wake(frontend_of(options), options.worker)
    return 0
