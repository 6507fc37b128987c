"""One row of a table of `penstock top` in full; a worker's with its log."""

import threading
from contextlib import closing
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import VerticalScroll
from textual.message import Message
from textual.screen import Screen
from textual.widgets import Footer, Log, Static

from penstock.core.errors import PenstockError
from penstock.deploy.commands.watching.details import details
from penstock.deploy.commands.watching.seen import Seen
from penstock.deploy.commands.watching.tables import Table
from penstock.deploy.commands.watching.words import line
from penstock.deploy.commands.watching.worker_log import WorkerLog

_POLL_S = 0.5
_LOG_LINES_MAX = 2000


class LogLines(Message):
    """New lines of a worker's log."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self.lines = lines


class RowScreen(Screen[None]):
    """Shows one row; if it leaves the table, its last state stays."""

    BINDINGS: ClassVar[list[BindingType]] = [("escape,backspace", "app.pop_screen", "Back")]
    CSS = """
    #row { height: auto; max-height: 70%; padding: 0 1; }
    #row Static { height: auto; }
    Log { height: 1fr; border-top: solid $primary; }
    """

    def __init__(self, table: Table, key: str, seen: Seen) -> None:
        super().__init__()
        self._table, self._key, self._first = table, key, seen
        self._text = Static(markup=False)
        worker = next((each for each in seen.snapshot.workers if each.name == key), None)
        self._worker = worker if table.name == "workers" else None
        self._is_closed = threading.Event()

    def compose(self) -> ComposeResult:
        yield VerticalScroll(self._text, id="row")
        if self._worker is not None:
            yield Log(max_lines=_LOG_LINES_MAX)
        yield Footer()

    def on_mount(self) -> None:
        self.display_row(self._table, self._first)
        if self._worker is not None:
            threading.Thread(
                target=self._follow, args=(self._worker.name, self._worker.pid), daemon=True
            ).start()

    def on_unmount(self) -> None:
        self._is_closed.set()

    def display_row(self, table: Table, seen: Seen) -> None:
        """Show the row of a snapshot; keep the last state if the row is gone."""
        if table.name == self._table.name and (lines := details(seen, table, self._key)):
            self._text.update("\n".join(lines))

    def on_log_lines(self, came: LogLines) -> None:
        self.query_one(Log).write_lines(came.lines)

    def _follow(self, name: str, pid: int) -> None:
        """Read the worker's log, in a thread, until the screen closes."""
        try:
            with closing(WorkerLog(name, pid)) as log:
                while not self._is_closed.is_set():
                    if lines := log.lines():
                        self.post_message(LogLines(lines))
                    self._is_closed.wait(_POLL_S)
        except (PenstockError, OSError) as error:
            self.post_message(LogLines([line(str(error))]))
