"""`penstock role`."""

import argparse
from typing import Any

from penstock.core.errors import ConfigError


def add(commands: Any) -> None:
    """Register the subcommand."""
    parser = commands.add_parser(
        "role",
        help="change the role of a running worker",
        description="Change a running worker's role to prefill, decode or aggregated without loading the model again: it drains"
        " within worker.drain_timeout_s and registers anew. See docs/disaggregation.md.",
    )
    parser.add_argument("worker", metavar="WORKER", help="its name in GET /admin/workers, such as prefill-1")
    parser.add_argument("role", metavar="ROLE", help="prefill, decode or aggregated")
    parser.add_argument(
        "--url",
        default="http://127.0.0.1:8000",
        help="URL of `penstock serve` (default http://127.0.0.1:8000)",
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from penstock.core.config import nearest  # noqa: PLC0415
    from penstock.core.types.instances import Role  # noqa: PLC0415
    from penstock.deploy.commands.worker_changes import run_role  # noqa: PLC0415

    known = [role.value for role in Role]
    if options.role not in known:
        raise ConfigError(f"ROLE: unknown {options.role!r}{nearest(options.role, known)}")
    run_role(options.url, options.worker, Role(options.role))
    return 0
