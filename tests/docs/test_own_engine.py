"""The engine of your own in docs/engines.md: at most 60 lines, and it passes the suite as the page says."""

import re
import sys
from pathlib import Path
from types import ModuleType

PAGE = Path(__file__).parents[2] / "docs" / "engines.md"
SECTION = PAGE.read_text().partition("\n## An engine of your own\n")[2]
ENGINE, SUITE = re.findall(r"(?ms)^```python\n(.*?)^```$", SECTION)


def _test_of_the_page() -> type:
    module = sys.modules["echo_engine"] = ModuleType("echo_engine")
    exec(compile(ENGINE, "docs/engines.md", "exec"), module.__dict__)
    page = {"__name__": __name__}
    exec(compile(SUITE, "docs/engines.md", "exec"), page)
    return page["TestEchoEngine"]


TestEchoEngine = _test_of_the_page()


def test_the_engine_is_short() -> None:
    assert len([line for line in ENGINE.splitlines() if line]) <= 60


def test_what_makes_the_engine_the_page_says() -> None:
    assert "--engine echo_engine:EchoEngine" in SECTION
    assert callable(sys.modules["echo_engine"].EchoEngine)
