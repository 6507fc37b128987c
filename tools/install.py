"""Install for `make`: `demo` what serving needs, `dev` what tests and checks need, `env` the packages of a file.

uv, itself from the index that pip is set to, installs the versions of uv.lock into .venv. This file needs the standard library alone.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - a make with an older Python comes this far
    sys.exit(
        f"penstock needs Python 3.11 or newer, and {sys.executable} is {sys.version.split()[0]}; name another with PYTHON=..."
    )

import argparse
import contextlib
import os
import re
import shutil
import socket
import subprocess
import threading
import time
import tomllib
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
UV = "uv==0.13.9"
GPU_PACKAGES = re.compile(r"(nvidia|cuda)-.*|triton")
"""What torch of PyPI needs on x86_64 and the CPU build does without."""
SIZES_GB = {
    ("demo", "cpu"): (0.3, 1.1),
    ("demo", "pypi"): (2.8, 5.2),
    ("dev", "cpu"): (0.6, 2.3),
    ("dev", "pypi"): (3.1, 6.4),
}
"""By what is installed and torch's build: to download, and in .venv; measured on x86_64 with Python 3.11 and torch 2.13.0."""
PIP_SETTINGS = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "trusted-host": "UV_INSECURE_HOST",
    "no-index": "UV_NO_INDEX",
    "cert": "SSL_CERT_FILE",
    "client-cert": "SSL_CLIENT_CERT",
    "keyring-provider": "UV_KEYRING_PROVIDER",
    "proxy": "ALL_PROXY",
    "default-timeout": "UV_HTTP_TIMEOUT",
    "timeout": "UV_HTTP_TIMEOUT",
}
"""Settings of pip about where packages come from, and the variable that says the same to uv, which reads no pip.conf."""


class InstallError(Exception):
    """What could not be installed, why, and the fix."""


def settings_for_uv(pip_config: str, environ: dict[str, str]) -> dict[str, str]:
    """Translate what `pip config list` prints into variables of uv.

    Args:
        pip_config: lines `LEVEL.KEY='VALUE'`; a level later in global, user, site, :env: wins.
        environ: a variable of uv that is set there stays.
    """
    levels = {"global": 0, "user": 1, "site": 2, "install": 3, ":env:": 4}
    found: dict[str, tuple[int, str]] = {}
    for line in pip_config.splitlines():
        if match := re.fullmatch(r"(:env:|\w+)\.([\w-]+)=(['\"])(.*)\3", line.strip()):
            level, key, value = levels.get(match[1], 0), match[2], match[4]
            if key in PIP_SETTINGS and (key not in found or found[key][0] <= level):
                found[key] = (level, value.replace("\\n", " ").strip())
    settings = {}
    for key, (_, value) in found.items():
        name = PIP_SETTINGS[key]
        if name == "UV_NO_INDEX" and value.lower() not in ("1", "true", "yes", "on"):
            continue
        if name == "UV_FIND_LINKS":
            text = ",".join(value.split())
        elif name == "UV_HTTP_TIMEOUT":
            text = str(max(1, int(float(value)))) if re.fullmatch(r"[\d.]+", value) else "60"
        else:
            text = value
        if text and not environ.get(name):
            settings[name] = text
    if "UV_INDEX" in settings or "UV_DEFAULT_INDEX" in settings or "UV_FIND_LINKS" in settings:
        settings.setdefault("UV_INDEX_STRATEGY", "unsafe-best-match")  # as pip, which asks all indexes
    return settings


class Installer:
    def __init__(self, venv: Path, *, native: bool) -> None:
        self.venv = venv
        self.native = native
        self.python = venv / "bin" / "python"
        self.began_s = time.monotonic()
        self.doing = "at it"
        self.environ = dict(os.environ)

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self.began_s:5.0f} s  {text}", flush=True)

    def make_venv(self) -> None:
        if not self.python.exists() or not (self.venv / "bin" / "pip").exists():
            self.say(f"Making {self.venv.name} with {sys.executable}")
            done = subprocess.run(
                [sys.executable, "-m", "venv", "--clear", self.venv], capture_output=True, text=True
            )
            if done.returncode:
                shutil.rmtree(self.venv, ignore_errors=True)
                raise InstallError(
                    f"{sys.executable} -m venv {self.venv} failed; on Debian and Ubuntu: apt-get install python3-venv;"
                    f" it said: {(done.stdout + done.stderr).strip()}"
                )
        config = subprocess.run(
            [self.python, "-m", "pip", "config", "list"], capture_output=True, text=True
        ).stdout
        self.environ |= settings_for_uv(config, self.environ)
        self.environ["VIRTUAL_ENV"] = str(self.venv)
        self.environ["PENSTOCK_NATIVE"] = "ON" if self.native else "OFF"
        self.environ["UV_PYTHON_DOWNLOADS"] = "never"
        # A HOME that cannot be written to has no place for a cache: uv takes a temporary one.
        cache = self.cache()
        writable = False
        with contextlib.suppress(OSError):
            if cache is not None:
                cache.mkdir(parents=True, exist_ok=True)
                writable = os.access(cache, os.W_OK)
        if not writable:
            self.environ["UV_NO_CACHE"] = "1"
            self.environ["PIP_NO_CACHE_DIR"] = "1"
        elif cache and cache.stat().st_dev != self.venv.stat().st_dev:
            self.environ["UV_LINK_MODE"] = "copy"

    def cache(self) -> Path | None:
        """Where uv keeps what it has downloaded; None without a HOME."""
        if named := self.environ.get("UV_CACHE_DIR"):
            return Path(named)
        if caches := self.environ.get("XDG_CACHE_HOME"):
            return Path(caches) / "uv"
        home = self.environ.get("HOME")
        return Path(home) / ".cache" / "uv" if home else None

    def install_uv(self) -> None:
        version = UV.partition("==")[2]
        with contextlib.suppress(OSError):
            said = subprocess.run(
                [self.venv / "bin" / "uv", "--version"], capture_output=True, text=True
            ).stdout.split()
            if said[1:2] == [version]:
                return
        self.say(f"Installing {UV}")
        self.run([self.python, "-m", "pip", "install", "-q", "--disable-pip-version-check", UV])

    def run(self, command: list[str | Path]) -> None:
        """Run a command and say what it says, and every ten silent seconds that it still runs."""
        heard_s = time.monotonic()
        process = subprocess.Popen(
            command,
            cwd=CHECKOUT,
            env=self.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )

        def say_that_it_runs() -> None:
            nonlocal heard_s
            while process.poll() is None:
                time.sleep(0.2)
                if time.monotonic() - heard_s >= 10:
                    heard_s = time.monotonic()
                    self.say(f"still {self.doing} ...")

        watcher = threading.Thread(target=say_that_it_runs, daemon=True)
        watcher.start()
        assert process.stdout is not None
        for line in process.stdout:
            if re.match(
                r"\s*[+~-] |\s*$|Using Python |WARNING: Retrying|WARNING: Location .* is ignored", line
            ):
                continue
            heard_s = time.monotonic()
            self.say(line.strip())
        if process.wait():
            shown = " ".join(str(part) for part in command)
            raise InstallError(
                f"`{shown}` ended with {process.returncode}, for the reason above. Where no package was found: is the index of"
                " `pip config list` reachable? Without uv: see 'With pip alone' in docs/quickstart.md"
            )

    def uv(self, *arguments: str | Path) -> None:
        self.run([self.venv / "bin" / "uv", *arguments])

    def answers(self, *arguments: str | Path, timeout_s: float = 300) -> bool:
        """Whether a command of uv succeeds, without a word."""
        environ = self.environ | {"UV_HTTP_TIMEOUT": "10", "UV_HTTP_RETRIES": "0"}
        command = [self.venv / "bin" / "uv", "-q", *arguments]
        with contextlib.suppress(subprocess.TimeoutExpired):
            done = subprocess.run(command, cwd=CHECKOUT, env=environ, capture_output=True, timeout=timeout_s)
            return done.returncode == 0
        return False

    def locked(self, *what: str) -> list[str]:
        """Requirements with hashes of what the lock file has for these extras and groups."""
        command = [
            self.venv / "bin" / "uv",
            "export",
            "-q",
            "--frozen",
            "--no-header",
            "--no-annotate",
            "--no-emit-project",
        ]
        done = subprocess.run(
            [*command, *what], cwd=CHECKOUT, env=self.environ, capture_output=True, text=True
        )
        if done.returncode:
            raise InstallError(f"uv.lock cannot be read: {done.stderr.strip()}")
        return done.stdout.replace("\\\n", " ").splitlines()

    def choose_torch(self, choice: str) -> tuple[str, list[str]]:
        """Choose torch's build: `cpu` or `pypi`, and the options of uv that find it."""
        if choice == "pypi" or (choice == "auto" and has_gpu()):
            return "pypi", []
        version = locked_version("torch")
        if list(self.venv.glob(f"lib/python*/site-packages/torch-{version}+cpu.dist-info")):
            return "cpu", []  # it is here: to compile native code anew takes no network
        wanted = f"torch=={version}+cpu"
        dry = ("pip", "install", "--dry-run", "--reinstall-package", "torch", "--no-deps", wanted)
        if self.answers(*dry):
            return "cpu", []
        if self.answers(*dry, "--torch-backend", "cpu"):
            return "cpu", ["--torch-backend", "cpu"]
        if choice == "cpu":
            raise InstallError(
                f"{wanted} is on no index that pip is set to, and download.pytorch.org cannot be reached;"
                " TORCH=pypi takes PyPI's build for GPUs, 3 GB"
            )
        self.say(
            f"{wanted} cannot be had: download.pytorch.org cannot be reached. PyPI's build, for GPUs, works too."
        )
        return "pypi", []

    def install(self, what: str, choice: str) -> None:
        """Install Penstock, editable, and what serving (`demo`) or tests and checks (`dev`) need."""
        self.make_venv()
        self.check_room(*SIZES_GB[what, "cpu"])
        self.install_uv()
        build, options = self.choose_torch(choice)
        gb, disk_gb = SIZES_GB[what, build]
        self.check_room(gb, disk_gb)
        self.say(
            f"Installing into {self.venv.name}: about {gb:.1f} GB to download, {disk_gb:.1f} GB on disk (torch for"
            f" {'CPUs' if build == 'cpu' else 'GPUs'}, native code {'ON' if self.native else 'OFF'})"
        )
        extras = ["--extra", "engine", "--no-dev"] if what == "demo" else ["--all-extras", "--group", "dev"]
        requirements = self.written(what, with_torch(build, self.locked(*extras)))
        builders = self.written("build", self.locked("--only-group", "build"))
        command: list[str | Path] = [
            "pip",
            "install",
            "--no-deps",
            "--reinstall-package",
            "penstock-llm",
            "-e",
            ".",
        ]
        if what == "demo":  # at once, so that native code is compiled while packages are downloaded
            command += ["--build-constraints", builders, "-r", requirements, *options]
        else:
            # The build of Penstock alone runs in .venv, so that the next one compiles only what has changed, and takes no network.
            self.uv("pip", "install", "--no-deps", *options, "-r", builders, "-r", requirements)
            command += ["--no-build-isolation-package", "penstock-llm"]
        for stamp in self.venv.glob(".installed-*"):
            stamp.unlink(missing_ok=True)
        if self.native:
            self.doing = "compiling native code (PENSTOCK_NATIVE=OFF leaves it out)"
        self.uv(*command)
        if not self.native:  # a build replaces the module; until one has succeeded, the former serves
            for module in CHECKOUT.glob("src/penstock/_native.*.so"):
                module.unlink(missing_ok=True)
        self.say(f"Installed into {self.venv.name}")

    def install_env(self, files: list[Path], choice: str) -> None:
        """Install what requirement files list, with all that it needs named there or `--no-deps` in a line of its own."""
        try:
            lines = [line for file in files for line in file.read_text().splitlines()]
        except OSError as error:
            raise InstallError(
                f"{error.filename}: {error.strerror}; expected a list of requirements"
            ) from error
        self.make_venv()
        self.install_uv()
        build, options = (
            self.choose_torch(choice) if any(line.startswith("torch==") for line in lines) else ("pypi", [])
        )
        self.say(f"Installing {', '.join(map(str, files))} into {self.venv}")
        self.uv("pip", "install", "--no-deps", *options, "-r", self.written("env", with_torch(build, lines)))

    def check_room(self, download_gb: float, disk_gb: float) -> None:
        """Check for a first install that the disk has room; where uv links what it downloads, that is what is on disk."""
        if (self.venv / "requirements-build.txt").exists():
            return
        needed_gb = disk_gb + (download_gb if self.environ.get("UV_LINK_MODE") == "copy" else 0)
        free_gb = shutil.disk_usage(self.venv).free / 1e9
        if free_gb < needed_gb:
            raise InstallError(
                f"{self.venv} needs {needed_gb:.1f} GB, and {free_gb:.1f} GB are free there; make room"
            )

    def written(self, name: str, lines: list[str]) -> Path:
        path = self.venv / f"requirements-{name}.txt"
        path.write_text("\n".join(lines) + "\n")
        return path


def locked_version(package: str) -> str:
    lock = tomllib.loads((CHECKOUT / "uv.lock").read_text())
    return next(str(found["version"]) for found in lock["package"] if found["name"] == package)


def with_torch(build: str, requirements: list[str]) -> list[str]:
    """Name the build of torch: that for CPUs has another version, another hash, and none of the GPU's packages."""
    if build == "pypi":  # === takes no 2.13.0+cpu, which == does, and which lies beside it on some indexes
        return [re.sub(r"^torch==", "torch===", line) for line in requirements]
    kept = [line for line in requirements if not GPU_PACKAGES.match(line)]
    return [re.sub(r"^(torch==[\d.]+)(\s.*)?$", r"\1+cpu", line) for line in kept]


def problem_of_port(port: str) -> str | None:
    """Say why nothing can listen on a port of this machine, before minutes are spent on an install."""
    if not port.isascii() or not port.isdigit() or not 0 <= int(port) <= 65535:
        return "expected a number from 0 to 65535"
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", int(port)))
        except OSError as error:
            return f"{os.strerror(error.errno or 0)}; stop what listens there, or choose another, such as PORT=8001"
    return None


def has_gpu() -> bool:
    """Whether this machine has an NVIDIA GPU that its driver sees."""
    if Path("/dev/nvidia0").exists():
        return True
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        return (
            "GPU 0" in subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30).stdout
        )
    return False


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["demo", "dev", "env"])
    parser.add_argument(
        "files",
        nargs="*",
        type=Path,
        metavar="FILE",
        help="for env: lists of requirements, each with all it needs",
    )
    parser.add_argument(
        "--venv", type=Path, default=CHECKOUT / ".venv", metavar="DIR", help="default .venv of the checkout"
    )
    parser.add_argument("--native", default="ON", help="ON or OFF: compile the native code")
    parser.add_argument("--torch", default="auto", help="auto, cpu or pypi; auto: cpu without an NVIDIA GPU")
    parser.add_argument("--port", help="for demo: where it will serve, which has to be free")
    arguments = parser.parse_intermixed_args()
    for name, given, known in (
        ("TORCH", arguments.torch, ("auto", "cpu", "pypi")),
        ("PENSTOCK_NATIVE", arguments.native, ("ON", "OFF")),
    ):
        if given not in known:
            sys.exit(f"tools/install.py: {name}={given}: expected {', '.join(known[:-1])} or {known[-1]}")
    if arguments.port is not None and (problem := problem_of_port(arguments.port)):
        sys.exit(f"tools/install.py: PORT={arguments.port}: {problem}")
    installer = Installer(arguments.venv.absolute(), native=arguments.native == "ON")
    try:
        if arguments.what == "env":
            installer.install_env(arguments.files, arguments.torch)
        else:
            installer.install(arguments.what, arguments.torch)
    except InstallError as error:
        sys.exit(f"tools/install.py: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
