"""Order and settings of all tests."""

import asyncio
import fcntl
import functools
import gc
import inspect
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Generator

import hypothesis
import pytest
import structlog
from folder_durations import FolderDurations

from tests.support import clients

_PROCESS = os.environ.get("PYTEST_XDIST_WORKER")
"""Which of several processes this one is that share the tests; None where it is the only one, or shares them out."""

hypothesis.settings.register_profile(
    "penstock",
    deadline=None,  # a busy machine is no failure
    print_blob=True,
    derandomize=bool(
        os.environ.get("CI")
    ),  # CI tries what it tried before; elsewhere every run tries something new
)
hypothesis.settings.register_profile(
    "quick", hypothesis.settings.get_profile("penstock"), max_examples=10
)  # what `make check` has time for: of the 7 bugs that tests plant in state machines, 10 examples find 6, and 25 no more
hypothesis.settings.register_profile(
    "without nightly", hypothesis.settings.get_profile("penstock"), max_examples=25
)  # a quarter of the time of properties; the night tries 100
hypothesis.settings.load_profile("penstock")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--folder-durations",
        action="store_true",
        help="at the end, say how long the tests of each folder took",
    )


def pytest_configure(config: pytest.Config) -> None:
    # A shell that runs the tests in the background has them ignore SIGINT, which programs under test would inherit.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if "not nightly" in config.option.markexpr and not config.getoption("--hypothesis-profile"):
        hypothesis.settings.load_profile("without nightly")
    if config.option.folder_durations and _PROCESS is None:
        config.pluginmanager.register(FolderDurations())
    # Commands choose among the deployments that run on this host: tests see neither the user's nor another process's.
    runtime_dir = tempfile.mkdtemp(prefix="tests-")
    os.environ["XDG_RUNTIME_DIR"] = os.environ["PENSTOCK_STATE_DIR"] = runtime_dir
    config.add_cleanup(functools.partial(shutil.rmtree, runtime_dir, ignore_errors=True))


def pytest_sessionstart() -> None:
    """Collect no garbage while modules are imported and tests collected: there is hardly any, and it takes a fifth of the time."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Collect garbage among what tests make from now on; what modules have made stays."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run slow tests last, since what is quickly known to be broken is quickly said, and those that want to be alone after all others."""
    items.sort(key=lambda item: (_has(item, "slow") or _has(item, "alone"), _has(item, "alone")))


def _has(item: pytest.Item, marker: str) -> bool:
    return item.get_closest_marker(marker) is not None


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Let no other process of this run test anything while a test runs that wants to be alone."""
    if _PROCESS is None:
        return (yield)
    with (item.config.rootpath / "pyproject.toml").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if _has(item, "alone") else fcntl.LOCK_SH)
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine: on an event loop of its own, of virtual time where it is marked so, and uvloop's where a frontend serves."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    import uvloop

    from penstock.sim.loop import run_virtual
    from penstock.testing.loop import run_async

    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    if _has(pyfuncitem, "virtual"):
        run_virtual(pyfuncitem.obj(**arguments))
    else:
        within = pyfuncitem.get_closest_marker("within")
        serves = pyfuncitem.nodeid.startswith(("tests/e2e/frontend/", "tests/e2e/watch/"))
        new_loop = uvloop.new_event_loop if serves else asyncio.new_event_loop
        run_async(
            pyfuncitem.obj(**arguments), timeout_s=within.args[0] if within else 120.0, loop_factory=new_loop
        )
    return True


_PACKAGES = {
    "cc": "g++",
    "chromium": "chromium",
    "curl": "curl",
    "ip": "iproute2",
    "openssl": "openssl",
    "prometheus": "prometheus",
    "promtool": "prometheus",
    "etcd": "etcd-server",
    "faketime": "faketime",
    "nats-server": "nats-server",
    "fish": "fish",
    "shellcheck": "shellcheck",
    "zsh": "zsh",
}
"""Programs that tests run, and the Debian packages that have them: all among ci/packages.txt."""


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a program, or rights, that are not here; where every test must run, as in CI, fail."""
    for marker in item.iter_markers("needs"):
        for need in marker.args:
            if (mend := _mend(need)) is None:
                continue
            if os.environ.get("PENSTOCK_NEVER_SKIP"):
                pytest.fail(f"{mend}; with PENSTOCK_NEVER_SKIP set this test must run", pytrace=False)
            pytest.skip(mend)


_NAMESPACES = {
    "namespaces": ("--net", "--mount"),
    "ipc-namespaces": ("--ipc",),
    "pid-namespaces": ("--user", "--map-root-user", "--pid", "--fork", "--mount-proc"),
}
"""What tests ask unshare for."""


@functools.cache
def _makes(namespaces: str) -> bool:
    command = ("unshare", *_NAMESPACES[namespaces], "true")
    return (
        shutil.which("unshare") is not None
        and not subprocess.run(command, check=False, capture_output=True).returncode
    )


def _mend(need: str) -> str | None:
    """Say what is missing and how to mend it; None where it is here."""
    if need.endswith(" clients"):
        return clients.missing(need.removesuffix(" clients"))
    if need in _NAMESPACES:
        return (
            None if _makes(need) else f"may not make {need}: sudo .venv/bin/pytest, or a privileged container"
        )
    if shutil.which(need):
        return None
    return f"{need} is not installed: sudo apt-get install -y {_PACKAGES[need]}"


@pytest.fixture(autouse=True)
def _log_as_at_the_start() -> None:
    """Undo what a command under test said about logs."""
    structlog.reset_defaults()
    # By default rich draws tracebacks, which took 30 s for that of a deep recursion.
    console = structlog.get_config()["processors"][-1]
    console.exception_formatter = structlog.dev.plain_traceback
    structlog.contextvars.clear_contextvars()
