"""`penstock top`: a running deployment, once a second, until `q`."""

import contextlib
import select
import sys
import termios
import tty
from collections.abc import Iterator

import msgspec
from rich.console import Console
from rich.live import Live

from penstock.core.errors import ConfigError, PenstockError
from penstock.deploy.commands.admin import ask, ask_stream, base_of
from penstock.deploy.commands.watching.screen import screen
from penstock.frontend.watch.snapshot import Snapshot
from penstock.router.dispatch.journeys import Journey

_ENDS = ("q", "Q", "\x03", "\x04")
_SILENT_S = 10.0
_ONCE_ROWS, _ONCE_COLUMNS = 60, 160


def show_top(url: str, *, once: bool, as_json: bool) -> None:
    """Show a deployment until `q` is pressed; once where `once` says so, or where stdout is no terminal.

    Raises:
        ConfigError: `url` is no URL, or of another version.
        RequestError: the server has no page, or asks for the admin token.
        Unavailable: no server answers, or it has ended.
    """
    base = base_of(url)
    console = Console()
    if once or as_json or not console.is_terminal:
        body = ask(base, "/watch/snapshot")
        if as_json:
            sys.stdout.write(body.decode() + "\n")
        else:
            wide = console if console.is_terminal else Console(width=_ONCE_COLUMNS)
            wide.print(screen(*_read(body), rows=_ONCE_ROWS))
        return
    events = ask_stream(base, "/watch/events", timeout_s=_SILENT_S)
    first = _read(next(events, b""))  # an error is said before the screen is taken
    with (
        contextlib.closing(events),
        Live(screen(*first, console.height), console=console, screen=True) as live,
        _keys(),
    ):
        for event in events:
            live.update(screen(*_read(event), console.height))
            if _pressed() in _ENDS:
                return
    raise PenstockError(f"--url: {base}: the server has ended")


def _read(body: bytes) -> tuple[Snapshot, list[Journey]]:
    try:
        snapshot = msgspec.json.decode(body, type=Snapshot)
        return snapshot, msgspec.convert(snapshot.requests, list[Journey])
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"--url: the answer is not Penstock's, or another version's: {error}") from error


@contextlib.contextmanager
def _keys() -> Iterator[None]:
    """Have the terminal give each key at once; nothing where stdin is no terminal."""
    if not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _pressed() -> str:
    """Give the key that was pressed; empty if none."""
    if not sys.stdin.isatty():
        return ""
    ready, _, _ = select.select([sys.stdin], [], [], 0)
    return sys.stdin.read(1) if ready else ""
