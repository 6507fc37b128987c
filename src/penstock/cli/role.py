"""`penstock role`."""

import argparse
from typing import Any

from penstock.core.errors import ConfigError


def add(commands: Any) -> None:
    """Add the command to those of `penstock`."""
    parser = commands.add_parser(
        "role",
        help="change the role of a worker that runs",
        description="Have a worker of a running deployment become a prefill, decode or aggregated one, with what it has"
        " loaded: it finishes what it has, within worker.drain_timeout_s, and comes back. See docs/disaggregation.md.",
    )
    parser.add_argument("worker", metavar="WORKER", help="its name in GET /admin/workers, such as prefill-1")
    parser.add_argument("role", metavar="ROLE", help="prefill, decode or aggregated")
    parser.add_argument(
        "--url", default="http://127.0.0.1:8000", help="of `penstock serve` (default http://127.0.0.1:8000)"
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from penstock.core.config import nearest  # noqa: PLC0415
    from penstock.core.types.instances import Role  # noqa: PLC0415
    from penstock.deploy.commands.role import run_role  # noqa: PLC0415

    known = [role.value for role in Role]
    if options.role not in known:
        raise ConfigError(f"ROLE: unknown {options.role!r}{nearest(options.role, known)}")
    run_role(options.url, options.worker, Role(options.role))
    return 0
