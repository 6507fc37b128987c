"""Stop strings in streamed text."""

import pytest

from penstock.frontend.text.stops import StopFinder


def feed(stops: list[str], *texts: str) -> tuple[list[str], bool]:
    finder = StopFinder(stops)
    given = []
    for text in texts:
        certain, stopped = finder.feed(text)
        given.append(certain)
        if stopped:
            return given, True
    given.append(finder.finish())
    return given, False


@pytest.mark.parametrize(
    ("stops", "texts", "given", "stopped"),
    [
        (["END"], ["hello ", "world"], ["hello ", "world", ""], False),
        (["END"], ["one E", "N", "D two"], ["one ", "", ""], True),
        (["END"], ["one E", "N", "E"], ["one ", "", "EN", "E"], False),
        (["END"], ["xEN"], ["x", "EN"], False),
        (["abcd", "bc"], ["xabc", "d"], ["xa"], True),
        (["cde", "abcde"], ["xabcde"], ["x"], True),
        (["aab"], ["aaa", "b"], ["a", ""], True),
    ],
    ids=[
        "none",
        "across borders",
        "a beginning that comes to nothing",
        "the end releases what is held",
        "complete first wins",
        "longest of two",
        "overlapping beginnings",
    ],
)
def test_text_is_given_out_as_soon_as_no_stop_string_can_begin_in_it(
    stops: list[str], texts: list[str], given: list[str], stopped: bool
) -> None:
    assert feed(stops, *texts) == (given, stopped)
