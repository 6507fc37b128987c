"""Nodes of a worker as processes of one host."""

from pathlib import Path

import pytest

from penstock.deploy.identity import SECRET_VARIABLE
from penstock.deploy.state import ADMIN_TOKEN_VARIABLE
from tests.support.groups import TOKEN
from tests.support.up import Up


@pytest.fixture
def node(tmp_path: Path):
    """Make nodes, each with directories of its own."""
    made: list[Up] = []

    def make(name: str) -> Up:
        folder = tmp_path / name
        (folder / "run").mkdir(parents=True)
        up = Up(folder, folder / "run")
        up.environment |= {
            SECRET_VARIABLE: "a secret of all nodes", ADMIN_TOKEN_VARIABLE: TOKEN, "PENSTOCK_HOST": name,
        }  # fmt: skip
        made.append(up)
        return up

    yield make
    for up in reversed(made):
        up.end()
