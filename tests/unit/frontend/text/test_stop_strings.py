"""Stop strings in streamed text."""

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


def test_text_goes_through_at_once() -> None:
    assert feed(["END"], "hello ", "world") == (["hello ", "world", ""], False)


def test_a_stop_string_across_borders_is_never_given_out() -> None:
    assert feed(["END"], "one E", "N", "D two") == (["one ", "", ""], True)


def test_a_beginning_that_comes_to_nothing_is_given_late() -> None:
    assert feed(["END"], "one E", "N", "E") == (["one ", "", "EN", "E"], False)


def test_the_end_of_the_output_releases_what_was_held() -> None:
    assert feed(["END"], "xEN") == (["x", "EN"], False)


def test_the_match_that_is_complete_first_wins() -> None:
    assert feed(["abcd", "bc"], "xabc", "d") == (["xa"], True)
    assert feed(["cde", "abcde"], "xabcde") == (["x"], True)


def test_overlapping_beginnings_are_kept() -> None:
    assert feed(["aab"], "aaa", "b") == (["a", ""], True)
