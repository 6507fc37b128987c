"""The wheel by itself: what is in it, and that its commands run with nothing of the checkout beside them."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

CHECKOUT = Path(__file__).parents[3]
PYTHON = sys._base_executable  # type: ignore[attr-defined]
"""Outside of the virtual environment: its .pth files, the checkout's editable install among them, are not read."""
TIMEOUT_S = 120


class Installed:
    """The wheel in a directory of its own, beside the dependencies of this environment."""

    def __init__(self, wheel: Path, directory: Path) -> None:
        self.wheel = wheel
        self.directory = directory
        self.target = directory / "installed"
        _pip("install", "--target", self.target, wheel)
        shutil.copytree(CHECKOUT / "examples", directory / "examples")
        packages = [place for place in sys.path if place.endswith(("site-packages", "dist-packages"))]
        self.environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(self.target), *packages]),
            "PENSTOCK_STATE_DIR": str(directory / "state"),
            "XDG_RUNTIME_DIR": str(directory),
        }

    def run(self, *arguments: str) -> str:
        return self.python("-m", "penstock", *arguments)

    def python(self, *arguments: str) -> str:
        done = subprocess.run(
            [PYTHON, *arguments],
            check=False,
            capture_output=True,
            text=True,
            cwd=self.directory,
            env=self.environment,
            timeout=TIMEOUT_S,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    @contextlib.contextmanager
    def demo(self) -> Iterator[str]:
        """Run `penstock serve --demo`; give the server's URL."""
        process = subprocess.Popen(
            [PYTHON, "-m", "penstock", "serve", "--demo", "--port", "0"],
            cwd=self.directory,
            env=self.environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout
        try:
            yield next(line.split()[2] for line in process.stdout if re.match("penstock +ready", line))
        finally:
            process.terminate()
            process.communicate(timeout=60)
        assert process.returncode == 0


def _pip(*arguments: str | Path) -> None:
    command = [sys.executable, "-m", "pip", arguments[0], "-q", "--no-deps", "--no-index", *arguments[1:]]
    subprocess.run(command, check=True, env=os.environ | {"PENSTOCK_NATIVE": "OFF"}, timeout=300)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    directory = tmp_path_factory.mktemp("wheel")
    _pip("wheel", "--no-build-isolation", "-w", directory, CHECKOUT)
    (wheel,) = directory.glob("penstock_llm-*.whl")
    return Installed(wheel, directory)


def test_the_wheel_has_the_package_and_nothing_beside_it(installed: Installed) -> None:
    names = zipfile.ZipFile(installed.wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"penstock"}
    folders = {name.split("/")[1] for name in names if name.count("/") > 1}
    assert {"bench", "doctor", "profiling", "testing"} < folders
    assert "penstock/frontend/watch/site/index.html" in names, "the live page"
    assert not {"benchmarks", "tests", "support"} & folders
    assert sorted(n for n in names if n.startswith("penstock/bench/") and n.count("/") > 2) == []
    where = installed.python("-c", "import penstock; print(penstock.__file__)")
    assert Path(where.strip()).is_relative_to(installed.target)


def test_every_module_of_the_suites_can_be_imported(installed: Installed) -> None:
    installed.python(
        "-c",
        "import importlib, pkgutil, penstock.testing as suites\n"
        "for module in pkgutil.walk_packages(suites.__path__, 'penstock.testing.'):\n"
        "    importlib.import_module(module.name)\n",
    )


def test_the_demo_answers_and_can_be_measured(installed: Installed) -> None:
    with installed.demo() as url:
        body = {"model": "penstock-demo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
        request = urllib.request.Request(
            f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            answer = json.load(response)
        assert answer["choices"][0]["message"]["content"]
        load = ("--requests", "4", "--concurrency", "2", "--input-tokens", "16", "--output-tokens", "4")
        installed.run(
            "bench", "serve", "--url", url, "--model", "penstock-demo", *load, "--json", "serve.json"
        )
    figures = json.loads((installed.directory / "serve.json").read_text())["figures"]
    assert figures["requests"] == 4


@pytest.mark.alone
def test_doctor(installed: Installed) -> None:
    installed.run("doctor", "--json", "doctor.json", "--directory", ".")
    assert json.loads((installed.directory / "doctor.json").read_text())


def test_simulate(installed: Installed) -> None:
    trace = CHECKOUT / "tests" / "data" / "mooncake_trace.jsonl"
    graph = "examples/graphs/8b-h100-x8.yaml"
    installed.run("simulate", str(trace), "--graph", graph, "--json", "simulate.json")
    assert json.loads((installed.directory / "simulate.json").read_text())


def test_plan(installed: Installed) -> None:
    lengths = ("--isl", "400", "--osl", "20", "--slo-ttft", "0.5", "--slo-itl", "0.012")
    installed.run(
        "plan", "llama-3.1-8b", "--hardware", "h100", "--gpus", "1", *lengths, "--json", "plan.json"
    )
    report = json.loads((installed.directory / "plan.json").read_text())
    assert report["layouts"]
