"""Checkpoints that the tests of the paged engine share; made once, in a second or two."""

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Callable[[str], Path]:
    """Give the directory of a tiny random checkpoint of an architecture."""
    from penstock.testing.checkpoints import make_checkpoint

    made: dict[str, Path] = {}

    def get(architecture: str) -> Path:
        if architecture not in made:
            made[architecture] = make_checkpoint(tmp_path_factory.mktemp(architecture), architecture)
        return made[architecture]

    return get
