"""The screens of `penstock top`."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.coordinate import Coordinate
from textual.message import Message
from textual.screen import Screen
from textual.widgets import DataTable, Footer, Input, Log, Static, TabbedContent, TabPane

from penstock.cli.logs import LogFollower, process_of
from penstock.cli.text import line, printable
from penstock.cli.top_tables import (
    TopRow,
    TopSnapshot,
    TopTable,
    alerts,
    details,
    figures,
    head,
    sorted_rows,
    tables,
)
from penstock.core.errors import PenstockError, Unavailable
from penstock.deploy.control.hosted import hosted
from penstock.deploy.control.local_connector import LocalConnector
from penstock.deploy.control.messages import SOCKET_NAME

_IN_USE, _CACHED = "dark_orange", "dodger_blue1"
_BAD = "red"


class Grid(DataTable[Text]):
    """Shows one `TopTable`. One task owns it."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "select_cursor", "Details")]

    def __init__(self, name: str) -> None:
        super().__init__(cursor_type="row", id=f"{name}-rows")
        self._labels: list[str] = []
        self._rows: list[TopRow] = []
        self.sort_column: int | None = None
        self.is_descending = False

    def display_table(self, table: TopTable, wanted: str) -> int:
        """Show the rows that contain `wanted`; give their number."""
        rows = [row for row in table.rows if row.has(wanted)]
        rows = sorted_rows(rows, self.sort_column, descending=self.is_descending)
        labels = [self._label(index, name) for index, name in enumerate(table.columns)]
        is_number = [name.startswith("#") for name in table.columns]
        if labels != self._labels or [row.key for row in rows] != [row.key for row in self._rows]:
            self._rebuild(labels, rows, is_number)
        else:
            self._update(rows, is_number)
        self._labels, self._rows = labels, rows
        return len(rows)

    def key_at(self, index: int) -> str:
        """Give the key of a row."""
        return self._rows[index].key

    def sort_by_next(self, columns: tuple[str, ...]) -> None:
        """Sort by the next column; after the last, as the rows come."""
        following = 0 if self.sort_column is None else self.sort_column + 1
        self.sort_by(following if following < len(columns) else None, columns)

    def sort_by(self, column: int | None, columns: tuple[str, ...]) -> None:
        """Sort by a column, numbers in descending order; reverse the order if it was sorted by this column already."""
        if column is not None and column == self.sort_column:
            self.is_descending = not self.is_descending
            return
        self.sort_column = column
        self.is_descending = column is not None and columns[column].startswith("#")

    def _label(self, index: int, name: str) -> str:
        mark = "" if index != self.sort_column else " ▼" if self.is_descending else " ▲"
        return name.removeprefix("#") + mark

    def _rebuild(self, labels: list[str], rows: list[TopRow], is_number: list[bool]) -> None:
        chosen = (
            self._rows[self.cursor_row].key if self._rows and self.is_valid_row_index(self.cursor_row) else ""
        )
        scrolled = self.scroll_offset
        self.clear(columns=True)
        for label, right in zip(labels, is_number, strict=True):
            self.add_column(Text(label, justify="right" if right else "left"))
        for row in rows:
            self.add_row(*_cells(row, is_number))
        at = next((index for index, row in enumerate(rows) if row.key == chosen), 0)
        self.move_cursor(row=at, scroll=False)
        self.scroll_to(x=scrolled.x, y=scrolled.y, animate=False)

    def _update(self, rows: list[TopRow], is_number: list[bool]) -> None:
        for index, (before, row) in enumerate(zip(self._rows, rows, strict=True)):
            if row == before:
                continue
            for column, cell in enumerate(_cells(row, is_number)):
                self.update_cell_at(Coordinate(index, column), cell, update_width=True)


def _cells(row: TopRow, is_number: list[bool]) -> list[Text]:
    return [
        _drawn(cell.text, right=right, is_bad=row.is_bad)
        for cell, right in zip(row.cells, is_number, strict=True)
    ]


def _drawn(text: str, *, right: bool, is_bad: bool) -> Text:
    """Give a cell; a plain string would be read as markup."""
    drawn = Text(text, style=_BAD if is_bad else "", justify="right" if right else "left", no_wrap=True)
    drawn.highlight_regex("█+", _IN_USE)
    drawn.highlight_regex("▒+", _CACHED)
    return drawn


_ENTRY_S = 1.0
_LINES_MAX = 200


class WorkerLog:
    """The last lines of a worker's output, and later those that have come since. One thread owns it."""

    def __init__(self, name: str, pid: int) -> None:
        """Find the log of the deployment that has this process.

        Raises:
            Unavailable: no deployment of this user on this host has it, or it has printed nothing yet.
        """
        self._process = name.partition("@")[0]
        self._follower = LogFollower(_log_of(self._process, pid))

    def lines(self) -> list[str]:
        """Give what came since the last time: at first the last 200 lines."""
        found = (text for text in self._follower.lines() if process_of(text) == self._process)
        return [printable(text).expandtabs() for text in deque(found, maxlen=_LINES_MAX)]

    def close(self) -> None:
        self._follower.close()


def _log_of(process: str, pid: int) -> Path:
    for each in hosted():
        if not each.is_live or each.record is None or not Path(each.record.log).is_file():
            continue
        try:
            processes = asyncio.run(
                LocalConnector(each.directory / SOCKET_NAME, entry_s=_ENTRY_S).processes()
            )
        except PenstockError:
            continue  # it starts or ends, or another user's
        if any((found.name, found.pid) == (process, pid) for found in processes):
            return Path(each.record.log)
    raise Unavailable(
        f"{process} (process {pid}) is of another host or user: `penstock logs {process}` there shows its log"
    )


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

    def __init__(self, table: TopTable, key: str, seen: TopSnapshot) -> None:
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

    def display_row(self, table: TopTable, seen: TopSnapshot) -> None:
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


_ALERTS_SHOWN = 4
_RETRY_S_MAX = 10.0
_STYLES = {"error": "bold red", "warning": "yellow", "info": "cyan", "fine": "green"}
_EVERYWHERE = frozenset({"quit", "theme", "pause", "pop_screen"})


class SnapshotReceived(Message):
    """A new snapshot."""

    def __init__(self, seen: TopSnapshot) -> None:
        super().__init__()
        self.seen = seen


class StreamLost(Message):
    """The stream of snapshots ended, with the reason."""

    def __init__(self, problem: str) -> None:
        super().__init__()
        self.problem = problem


class TopApp(App[None]):
    """Shows a deployment once a second until it is quit; while the server is away, the last snapshot.

    Args:
        first: the first snapshot.
        bodies: opens a stream of snapshots; it may end, and raise PenstockError.
    """

    TITLE = "penstock top"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,ctrl+d", "quit", "Quit"),
        Binding("ctrl+c", "quit", show=False, priority=True),
        Binding("slash", "filter", "Filter"),
        Binding("s", "sort", "Sort"),
        Binding("r", "reverse", "Reverse"),
        Binding("p", "pause", "Pause"),
        Binding("t", "theme", "Theme"),
        Binding("escape", "no_filter", show=False),
        *(Binding(str(number), f"tab({number})", show=False) for number in range(1, 7)),
    ]
    CSS = """
    #head { height: auto; text-style: bold; }
    #alerts, #figures { height: auto; }
    TabbedContent { height: 1fr; }
    TabPane { padding: 0; }
    Grid { height: 1fr; }
    .empty { height: auto; color: $text-muted; padding: 0 1; }
    #filter { display: none; height: 3; }
    """

    def __init__(self, first: TopSnapshot, bodies: Callable[[], Iterator[bytes]]) -> None:
        super().__init__()
        self._seen, self._bodies = first, bodies
        self._tables = {table.name: table for table in tables(first)}
        self._problem = ""
        self._is_paused = False
        self._is_over = threading.Event()
        self._head, self._alerts, self._figures = (
            Static(id=name, markup=False) for name in ("head", "alerts", "figures")
        )
        self._grids = {name: Grid(name) for name in self._tables}
        self._empty = {name: Static(classes="empty", markup=False) for name in self._tables}
        self._filter = Input(placeholder="rows that contain ...", id="filter")
        self._tabs = TabbedContent()

    def compose(self) -> ComposeResult:
        yield self._head
        yield self._alerts
        yield self._figures
        with self._tabs:
            for number, name in enumerate(self._tables, 1):
                with TabPane(f"{number} {name}", id=name):
                    yield self._empty[name]
                    yield self._grids[name]
        yield self._filter
        yield Footer()

    def on_mount(self) -> None:
        self._show()
        self._grid.focus()
        threading.Thread(target=self._watch, daemon=True).start()

    def on_unmount(self) -> None:
        self._is_over.set()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:  # noqa: ARG002 - textual's signature
        """Disable the keys of tables while one row is shown."""
        return action in _EVERYWHERE or not isinstance(self.screen, RowScreen)

    def on_snapshot_received(self, message: SnapshotReceived) -> None:
        self._problem = ""
        if not self._is_paused:
            self._seen = message.seen
            self._tables = {table.name: table for table in tables(message.seen)}
        self._show()

    def on_stream_lost(self, message: StreamLost) -> None:
        self._problem = message.problem
        self._show()

    def on_tabbed_content_tab_activated(self) -> None:
        self._grid.focus()

    def on_data_table_row_selected(self, chosen: DataTable.RowSelected) -> None:
        table = self._table
        self.push_screen(RowScreen(table, self._grids[table.name].key_at(chosen.cursor_row), self._seen))

    def on_data_table_header_selected(self, chosen: DataTable.HeaderSelected) -> None:
        self._grid.sort_by(chosen.column_index, self._table.columns)
        self._show()

    def on_input_changed(self) -> None:
        self._show()

    def on_input_submitted(self) -> None:
        self._grid.focus()

    def action_tab(self, number: int) -> None:
        """Show the n-th table."""
        self._tabs.active = list(self._tables)[number - 1]

    def action_sort(self) -> None:
        """Sort by the next column."""
        self._grid.sort_by_next(self._table.columns)
        self._show()

    def action_reverse(self) -> None:
        """Reverse the order."""
        self._grid.sort_by(self._grid.sort_column, self._table.columns)
        self._show()

    def action_filter(self) -> None:
        """Open the filter."""
        self._filter.display = True
        self._filter.focus()

    def action_no_filter(self) -> None:
        """Show all rows again."""
        self._filter.value = ""
        self._filter.display = False
        self._grid.focus()

    def action_pause(self) -> None:
        """Pause, or go on."""
        self._is_paused = not self._is_paused
        self._show()

    def action_theme(self) -> None:
        """Change between dark and light."""
        self.theme = "textual-light" if self.current_theme.dark else "textual-dark"

    @property
    def _table(self) -> TopTable:
        return self._tables[self._tabs.active or next(iter(self._tables))]

    @property
    def _grid(self) -> Grid:
        return self._grids[self._table.name]

    def _show(self) -> None:
        self._head.update(f"{head(self._seen)}  {self._state()}")
        found = (Text(text, style=_STYLES[severity]) for severity, text in alerts(self._seen, _ALERTS_SHOWN))
        self._alerts.update(Text("\n").join(found))
        self._figures.update(figures(self._seen))
        wanted = self._filter.value
        for name, table in self._tables.items():
            count = self._grids[name].display_table(table, wanted)
            self._empty[name].display = not count
            self._empty[name].update(table.empty if not table.rows else f"no row contains {wanted!r}")
        for screen in self.screen_stack:
            if isinstance(screen, RowScreen):
                for table in self._tables.values():
                    screen.display_row(table, self._seen)

    def _state(self) -> str:
        if self._problem:
            return line(f"lost: {self._problem}; tries again")
        return "paused" if self._is_paused else "live"

    def _watch(self) -> None:
        """Take snapshots as they come, in a thread, until the app ends."""
        wait_s = 1.0
        while not self._is_over.is_set():
            problem = "the server has ended the stream"
            try:
                for body in self._bodies():
                    self._post(SnapshotReceived(TopSnapshot.read(body)))
                    wait_s = 1.0
                    if self._is_over.is_set():
                        return
            except PenstockError as error:
                problem = error.message
            self._post(StreamLost(problem))
            self._is_over.wait(wait_s)
            wait_s = min(2 * wait_s, _RETRY_S_MAX)

    def _post(self, message: Message) -> None:
        if not self._is_over.is_set():
            self.post_message(message)
