"""Order and settings of all tests."""

import os

import hypothesis
import pytest
import structlog

hypothesis.settings.register_profile(
    "penstock",
    deadline=None,  # a busy machine is no failure
    print_blob=True,
    derandomize=bool(
        os.environ.get("CI")
    ),  # CI tries what it tried before; elsewhere every run tries something new
)
hypothesis.settings.register_profile(
    "quick", hypothesis.settings.get_profile("penstock"), max_examples=25
)  # what `make check` has time for; tests that want more ask for a multiple of the profile's
hypothesis.settings.load_profile("penstock")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run slow tests last: what is quickly known to be broken is quickly said."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)


@pytest.fixture(autouse=True)
def _log_as_at_the_start() -> None:
    """Undo what a command under test said about logs."""
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()
