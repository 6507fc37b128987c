"""The main screen of `penstock top`."""

import threading
from collections.abc import Callable, Iterator
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.widgets import DataTable, Footer, Input, Static, TabbedContent, TabPane

from penstock.core.errors import PenstockError
from penstock.deploy.commands.watching.grid import Grid
from penstock.deploy.commands.watching.row_screen import RowScreen
from penstock.deploy.commands.watching.seen import Seen
from penstock.deploy.commands.watching.summary import alerts, figures, head
from penstock.deploy.commands.watching.tables import Table, tables
from penstock.deploy.commands.watching.words import line

_ALERTS_SHOWN = 4
_RETRY_S_MAX = 10.0
_STYLES = {"error": "bold red", "warning": "yellow", "info": "cyan", "fine": "green"}
_EVERYWHERE = frozenset({"quit", "theme", "pause", "pop_screen"})


class SnapshotReceived(Message):
    """A new snapshot."""

    def __init__(self, seen: Seen) -> None:
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

    def __init__(self, first: Seen, bodies: Callable[[], Iterator[bytes]]) -> None:
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
    def _table(self) -> Table:
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
                    self._post(SnapshotReceived(Seen.read(body)))
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
