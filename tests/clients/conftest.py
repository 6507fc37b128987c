"""The demo model, served for evaluations and load generators: `make test-clients` runs these tests."""

import tempfile
from collections.abc import Iterator

import pytest

from benchmarks.processes.served import Served, served


@pytest.fixture(scope="session")
def demo() -> Iterator[Served]:
    """Serve the demo model by one worker with the paged engine."""
    with tempfile.TemporaryDirectory(prefix="e2e-") as name, pytest.MonkeyPatch.context() as environment:
        environment.setenv("XDG_RUNTIME_DIR", name)
        environment.setenv("PENSTOCK_STATE_DIR", name)
        with served("--demo", "--workers", "1") as deployment:
            environment.undo()
            yield deployment
