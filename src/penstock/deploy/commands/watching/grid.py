"""A table of `penstock top`: sorted and filtered; the cursor stays on its row while rows come and go."""

from typing import ClassVar

from rich.text import Text
from textual.binding import Binding, BindingType
from textual.coordinate import Coordinate
from textual.widgets import DataTable

from penstock.deploy.commands.watching.tables import Row, Table, sorted_rows

_IN_USE, _CACHED = "dark_orange", "dodger_blue1"
_BAD = "red"


class Grid(DataTable[Text]):
    """Shows one `Table`. One task owns it."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "select_cursor", "Details")]

    def __init__(self, name: str) -> None:
        super().__init__(cursor_type="row", id=f"{name}-rows")
        self._labels: list[str] = []
        self._rows: list[Row] = []
        self.sort_column: int | None = None
        self.is_descending = False

    def display_table(self, table: Table, wanted: str) -> int:
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

    def _rebuild(self, labels: list[str], rows: list[Row], is_number: list[bool]) -> None:
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

    def _update(self, rows: list[Row], is_number: list[bool]) -> None:
        for index, (before, row) in enumerate(zip(self._rows, rows, strict=True)):
            if row == before:
                continue
            for column, cell in enumerate(_cells(row, is_number)):
                self.update_cell_at(Coordinate(index, column), cell, update_width=True)


def _cells(row: Row, is_number: list[bool]) -> list[Text]:
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
