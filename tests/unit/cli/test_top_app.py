"""The screens of `penstock top`, driven by keys."""

import asyncio
import queue
from collections.abc import Callable

import pytest

from penstock.cli.top_app import RowScreen, TopApp
from penstock.cli.top_tables import TopSnapshot
from penstock.core.errors import Unavailable
from tests.support import snapshots
from tests.support.given_by import given_by

pytestmark = pytest.mark.slow

NAMES = [f"decode-{number}" for number in range(1, 6)]


def fleet(**fields):
    workers = tuple(snapshots.worker(name, running=at * 7 % 5) for at, name in enumerate(NAMES))
    return snapshots.body(workers=workers, **fields)


class Driven:
    """An app in a terminal that is not there, and the server it watches."""

    def __init__(self, app, pilot, bodies):
        self.app, self.pilot, self.bodies = app, pilot, bodies

    @property
    def text(self):
        """What the screen shows."""
        return "\n".join(
            "".join(segment.text for segment in strip).rstrip()
            for strip in self.app.screen._compositor.render_strips()
        )

    async def until(self, holds: Callable[[], bool]):
        async with asyncio.timeout(60):
            while not holds():
                await self.pilot.pause(0.01)

    def names(self):
        """The first column of the table that is shown, from above."""
        return [str(self.app._grid.get_row_at(row)[0]) for row in range(self.app._grid.row_count)]


@pytest.fixture
def drive():
    """Give a function that runs a scenario on an app, before which there is a body of the server's."""
    return _drive


def _drive(scenario, body=None):
    bodies = queue.Queue()

    def stream():
        while (body := bodies.get()) is not None:
            if isinstance(body, Exception):
                raise body
            yield body

    async def main():
        app = TopApp(TopSnapshot.read(body or fleet()), stream)
        async with app.run_test(size=(150, 40)) as pilot:
            await scenario(Driven(app, pilot, bodies))
        bodies.put(None)
        return app

    return asyncio.run(main())


@given_by("drive")
async def test_rows_are_sorted_by_keys_and_the_cursor_stays_on_its_row(driven):
    assert driven.names() == NAMES
    await driven.pilot.press("down", "down")  # decode-3
    await driven.pilot.press(*["s"] * 5)  # by #run, from the largest on
    assert driven.names() == ["decode-3", "decode-5", "decode-2", "decode-4", "decode-1"]
    assert "run ▼" in driven.text
    assert driven.app._grid.cursor_row == 0
    await driven.pilot.press("r")
    assert driven.names()[0] == "decode-1"
    assert driven.app._grid.cursor_row == 4
    more = tuple(snapshots.worker(name, running=9 - int(name[-1])) for name in ["decode-9", *NAMES])
    driven.bodies.put(snapshots.body(workers=more))
    await driven.until(lambda: len(driven.names()) == 6)
    assert driven.names()[0] == "decode-9"
    assert driven.app._grid.key_at(driven.app._grid.cursor_row) == "decode-3"


@given_by("drive")
async def test_only_rows_that_contain_a_text_are_shown_until_escape(driven):
    await driven.pilot.press("slash", *"CODE-4", "enter")
    assert driven.names() == ["decode-4"]
    await driven.pilot.press("slash", *"xyz")
    await driven.until(lambda: "no row contains 'xyz'" in driven.text)
    await driven.pilot.press("escape")
    assert driven.names() == NAMES


@given_by("drive")
async def test_enter_shows_a_row_in_full_which_goes_on_and_stays_once_it_has_left(driven):
    await driven.pilot.press("enter")
    await driven.until(lambda: isinstance(driven.app.screen, RowScreen))
    await driven.until(lambda: "decode-1: decode worker of tiny, process 4711 on host-a" in driven.text)
    await driven.until(lambda: "is of another host or user: `penstock logs decode-1` there" in driven.text)
    driven.bodies.put(snapshots.body(workers=(snapshots.worker("decode-1", preemptions=77),)))
    await driven.until(lambda: "77 preempted" in driven.text)
    driven.bodies.put(snapshots.body(workers=()))
    await driven.pilot.press("slash", "s")  # keys of the tables do nothing here
    await driven.until(lambda: not driven.app._seen.snapshot.workers)
    assert "77 preempted" in driven.text
    await driven.pilot.press("escape")
    await driven.until(lambda: "no worker yet" in driven.text)
    await driven.pilot.press("4", "enter")
    await driven.until(lambda: "KV transfer: prefill-1 to decode-1" in driven.text)


@given_by("drive")
async def test_a_lost_server_is_said_with_what_was_seen_last_and_found_again(driven):
    driven.bodies.put(Unavailable("nobody answers"))
    await driven.until(lambda: "lost: nobody answers; tries again" in driven.text)
    assert driven.names() == NAMES
    driven.bodies.put(snapshots.body(workers=()))
    await driven.until(lambda: "live" in driven.text and driven.names() == [])


@given_by("drive")
async def test_paused_it_shows_what_it_showed(driven):
    await driven.pilot.press("p")
    driven.bodies.put(snapshots.body(workers=()))
    driven.bodies.put(Unavailable("gone"))
    await driven.until(lambda: "lost: gone" in driven.text)
    assert driven.names() == NAMES
    await driven.pilot.press("p")
    driven.bodies.put(snapshots.body(workers=()))
    await driven.until(lambda: driven.names() == [])


def test_names_are_no_markup_and_bad_workers_are_marked():
    hostile = "[red]x[/red][@click=app.quit]y[/]"
    workers = (snapshots.worker(hostile, condition="lost"), snapshots.worker(hostile))

    async def scenario(driven):
        assert driven.names() == [hostile, hostile]
        await driven.pilot.press("enter")
        await driven.until(lambda: hostile in driven.text)
        await driven.pilot.press("escape", "t", "t", "t")

    _drive(scenario, snapshots.body(workers=workers, models=(hostile,), alerts=(snapshots.alert(hostile),)))


def test_q_and_ctrl_c_quit():
    for key in ("q", "ctrl+c", "ctrl+d"):

        async def scenario(driven, key=key):
            await driven.pilot.press(key)
            await driven.until(lambda: not driven.app.is_running)

        assert _drive(scenario).return_code == 0
