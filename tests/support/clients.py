"""Clients of the HTTP API that live in environments of their own, as `make clients` installs them."""

import asyncio
import json
import os
import shutil
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(os.environ.get("PENSTOCK_CLIENTS") or Path.home() / ".cache" / "penstock" / "clients")
NODE = shutil.which("node") or str(ROOT / "node" / "nodejs" / "bin" / "node")
PROGRAMS = Path(__file__).parents[1] / "e2e" / "clients" / "programs"


def missing(name: str) -> str | None:
    """Say how to install an environment of clients; None where it is here."""
    if (ROOT / name / ".installed").exists():
        return None
    goal = "test-clients" if name in {"evals", "aiperf"} else "clients"
    return f"the clients of {name!r} are not in {ROOT}: make {goal}"


async def run_program(name: str, program: str, *arguments: str, timeout_s: float = 240.0) -> Any:
    """Run a program of `PROGRAMS` in an environment; returns the JSON that it prints last."""
    said = await run_command(name, [str(PROGRAMS / program), *arguments], timeout_s=timeout_s)
    return json.loads(said.strip().splitlines()[-1])


async def run_command(
    name: str,
    arguments: Sequence[str],
    *,
    command: str | None = None,
    folder: Path | None = None,
    timeout_s: float = 240.0,
) -> str:
    """Run Python (or, for "node", node) with arguments, or a `command` of the environment; returns what it printed.

    Raises:
        AssertionError: it failed or hung; the text has its output.
    """
    home = ROOT / name
    program = NODE if name == "node" else str(home / "bin" / (command or "python"))
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    environment |= {
        "NODE_PATH": str(home / "node_modules"),
        "PYTHONUNBUFFERED": "1",
        "PENSTOCK_SITE": sysconfig.get_path("purelib"),  # torch and transformers, which evaluations import
        "HF_DATASETS_OFFLINE": "1",
    }
    process = await asyncio.create_subprocess_exec(
        program,
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=environment,
        cwd=folder,
    )
    try:
        async with asyncio.timeout(timeout_s):
            said, _ = await process.communicate()
    except TimeoutError:
        process.kill()
        said, _ = await process.communicate()
        raise AssertionError(f"{program} {arguments} took over {timeout_s:g} s:\n{said.decode()}") from None
    assert process.returncode == 0, f"{program} {arguments} failed:\n{said.decode()}"
    return said.decode()
