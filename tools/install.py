"""Install for `make`: `demo` what serving needs, `dev` what tests and checks need, `env` the packages of a file.

uv, itself from the index that pip is set to, installs the versions of uv.lock into .venv. This file needs the standard library alone.
"""

import sys

# The packages of uv.lock are for these alone: for others uv would leave out every one, and call that installed.
# Python 3.6 has to come this far, so nothing below has a syntax that is newer.
if sys.platform != "linux":
    sys.exit(f"penstock runs on Linux, and this is {sys.platform}; use a Linux machine, VM or container")
if not (3, 11) <= sys.version_info[:2] <= (3, 14):
    sys.exit(
        f"penstock is installed with Python 3.11 to 3.14, and {sys.executable} is {sys.version.split()[0]};"
        " name another with PYTHON=..."
    )

import argparse
import ast
import contextlib
import csv
import fcntl
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
UV = "uv==0.13.9"
OLDEST_GLIBC = (2, 31)
"""Of the wheels of uv.lock, as on Debian 11, Ubuntu 20.04 and RHEL 9."""
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
OLDER_NAMES = {"UV_DEFAULT_INDEX": "UV_INDEX_URL", "UV_INDEX": "UV_EXTRA_INDEX_URL"}
KEPT_OF_UV = re.compile(
    r"UV_(.*INDEX.*|FIND_LINKS|INSECURE_HOST|KEYRING_PROVIDER|CREDENTIALS_DIR|SYSTEM_CERTS|NATIVE_TLS|HTTP_.*|CONCURRENT_.*"
    r"|OFFLINE|CACHE_DIR|NO_CACHE|LINK_MODE)"
)
"""Variables of uv that say where packages come from. Others install elsewhere (UV_SYSTEM_PYTHON), or less (UV_EXCLUDE_NEWER)."""
AUTHORITIES = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
]
"""Files of the authorities that a machine trusts, those of its company among them. pip and uv bring lists of their own."""


class InstallError(Exception):
    """What could not be installed, why, and the fix."""


def settings_of_pip(pip_config: str) -> dict[str, str]:
    """Find where packages come from in what `pip config list` prints: lines `SECTION.KEY='VALUE'`.

    As in pip, the section `install` wins over `global`, variables (`:env:`) over both, and other commands' sections count for nothing.
    """
    sections = ["global", "install", ":env:"]
    lines = [re.fullmatch(r"(:env:|\w+)\.([\w-]+)=(.+)", line.strip()) for line in pip_config.splitlines()]
    found = [match for match in lines if match and match[1] in sections and match[2] in PIP_SETTINGS]
    found.sort(key=lambda match: sections.index(match[1]))
    values = {match[2]: " ".join(str(ast.literal_eval(match[3])).split()) for match in found}
    return {key: value for key, value in values.items() if value}


def settings_for_uv(pip: dict[str, str], environ: dict[str, str]) -> dict[str, str]:
    """Translate settings of pip into variables of uv; a variable that is set in `environ` stays."""
    settings = {}
    for key, given in pip.items():
        name, value = PIP_SETTINGS[key], given
        if name == "UV_NO_INDEX":
            value = "1" if given.lower() in ("1", "true", "t", "yes", "y", "on") else ""
        elif name == "UV_FIND_LINKS":
            value = ",".join(given.split())
        elif name == "UV_HTTP_TIMEOUT":
            value = str(max(1, int(float(given)))) if re.fullmatch(r"\d+(\.\d*)?", given) else ""
        elif name == "SSL_CERT_FILE" and Path(given).is_dir():
            name = "SSL_CERT_DIR"
        elif name == "UV_KEYRING_PROVIDER":  # pip's auto and import mean: if there is a keyring
            found = shutil.which("keyring", path=environ.get("PATH", ""))
            value = "subprocess" if found and given != "disabled" else "disabled"
        if value and not environ.get(name) and not environ.get(OLDER_NAMES.get(name, name)):
            settings[name] = value
    if {"UV_INDEX", "UV_DEFAULT_INDEX", "UV_FIND_LINKS"} & settings.keys():
        # As pip, which asks all indexes.
        settings["UV_INDEX_STRATEGY"] = environ.get("UV_INDEX_STRATEGY") or "unsafe-best-match"
    return settings


class Installer:
    def __init__(self, venv: Path, *, native: bool) -> None:
        self.venv = venv
        self.native = native
        self.python = venv / "bin" / "python"
        self.began_s = time.monotonic()
        self.lock = -1
        # With these Python runs what is not in its environment, or installs beside it.
        self.environ = {
            key: value for key, value in os.environ.items() if key not in ("PYTHONHOME", "PYTHONPATH")
        }

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self.began_s:5.0f} s  {text}", flush=True)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Wait until no other install into the same folder runs, nor anything that a killed one has left running."""
        try:
            self.venv.mkdir(parents=True, exist_ok=True)
            self.lock = os.open(self.venv, os.O_RDONLY)
        except OSError as error:
            raise InstallError(
                f"{self.venv} cannot be made: {error.strerror}; remove what is there, or use a checkout that you can write to"
            ) from error
        if not os.access(self.venv, os.W_OK):
            raise InstallError(f"{self.venv} cannot be written to; remove it, or use a checkout of your own")
        with contextlib.suppress(OSError):  # of a file system without locks
            try:
                fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.say(f"Waiting for another install into {self.venv}")
                fcntl.flock(self.lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            os.close(self.lock)

    def make_venv(self) -> None:
        reason = self.why_anew()
        if reason is not None:
            self.say(f"Making {self.venv.name} with {sys.executable}{reason}")
            code, said = self.run(
                sys.executable,
                "-m",
                "venv",
                "--clear",
                self.venv,
                doing=f"making {self.venv.name}",
                quiet=True,
            )
            if code:
                raise InstallError(
                    f"{sys.executable} -m venv {self.venv} failed; on Debian and Ubuntu: apt-get install python3-venv;"
                    f" it said: {said}"
                )
        code, said = self.run(
            self.python, "-m", "pip", "config", "list", doing="reading pip's settings", quiet=True
        )
        if code:
            raise InstallError(f"`pip config list` failed; mend pip's settings: {said}")
        pip = settings_of_pip(said)
        authorities = next((file for file in AUTHORITIES if Path(file).is_file()), None)
        if authorities and not self.environ.get("SSL_CERT_FILE") and not self.environ.get("SSL_CERT_DIR"):
            pip.setdefault("cert", authorities)
        # What else is set for pip or uv may install elsewhere, or something else.
        self.environ = {
            key: value
            for key, value in self.environ.items()
            if not key.startswith("PIP_") and (not key.startswith("UV_") or KEPT_OF_UV.fullmatch(key))
        }
        self.environ |= settings_for_uv(pip, self.environ)
        self.environ |= {f"PIP_{key.replace('-', '_').upper()}": value for key, value in pip.items()}
        self.environ |= {
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_NO_INPUT": "1",
            "UV_NO_CONFIG": "1",
            "UV_PYTHON_DOWNLOADS": "never",
        }
        self.environ["PENSTOCK_NATIVE"] = "ON" if self.native else "OFF"
        cache = self.cache()
        self.environ["UV_CACHE_DIR"] = str(cache)
        self.environ["PIP_CACHE_DIR"] = str(cache.with_name("pip"))
        if cache.stat().st_dev != self.venv.stat().st_dev:
            self.environ.setdefault("UV_LINK_MODE", "copy")
        self.forget_incomplete()

    def why_anew(self) -> str | None:
        """Say why the environment has to be made anew; empty where there is none yet, None if it serves."""
        pip = self.venv / "bin" / "pip"
        if not pip.is_file():
            return ""
        code, version = self.run(
            self.python,
            "-c",
            "import sys; print(sys.version)",
            doing=f"waiting for {self.venv.name}",
            quiet=True,
        )
        if code:
            return ", for its Python is gone"
        if version.split() != sys.version.split():
            return f", for it was made with {version.split()[0]}"
        if str(self.python) not in pip.read_text(errors="replace"):
            return ", for it was made in another folder"
        return None

    def cache(self) -> Path:
        """Where uv keeps what it has downloaded: in the checkout where HOME cannot be written to."""
        home, caches = self.environ.get("HOME"), self.environ.get("XDG_CACHE_HOME")
        places = [self.environ.get("UV_CACHE_DIR"), caches and f"{caches}/uv", home and f"{home}/.cache/uv"]
        for place in filter(None, places):
            with contextlib.suppress(OSError):
                Path(place).mkdir(parents=True, exist_ok=True)
                if os.access(place, os.W_OK):
                    return Path(place).absolute()
        cache = CHECKOUT / ".cache" / "uv"
        cache.mkdir(parents=True, exist_ok=True)
        return cache

    def forget_incomplete(self) -> None:
        """Have a package installed again that an install which was killed has left without some of its files.

        uv believes the name of a `.dist-info`, and writes its RECORD, which then names INSTALLER, as the last of a package's files.
        """
        lacking = []
        for info in self.venv.glob("lib/python*/site-packages/*.dist-info"):
            if info.name.startswith(("pip-", "uv-")):
                continue
            try:
                rows = list(csv.reader((info / "RECORD").read_text().splitlines()))
                sizes = {name: size for name, _, size in rows}
                complete = f"{info.name}/INSTALLER" in sizes and all(
                    (info.parent / name).stat().st_size == int(size) for name, size in sizes.items() if size
                )
            except (OSError, ValueError):
                complete = False
            if not complete:
                lacking.append(info.name.partition("-")[0])
                shutil.rmtree(info)
        if lacking:
            self.say(f"Installing again what is not all there: {', '.join(sorted(lacking))}")

    def install_uv(self) -> None:
        version = UV.partition("==")[2]
        code, said = self.run(
            self.venv / "bin" / "uv", "--version", doing=f"waiting for {self.venv.name}", quiet=True
        )
        if code == 0 and said.split()[1:2] == [version]:
            return
        for info in self.venv.glob("lib/python*/site-packages/uv-*.dist-info"):
            shutil.rmtree(info)
        self.say(f"Installing {UV}")
        self.do(
            self.python,
            "-m",
            "pip",
            "install",
            "-q",
            "--disable-pip-version-check",
            UV,
            doing="downloading uv",
        )

    def run(self, *command: str | Path, doing: str, quiet: bool = False, **variables: str) -> tuple[int, str]:
        """Run a command; say its lines, or with `quiet` return them, and say every ten silent seconds that it still runs.

        Returns:
            The exit code, 127 for a program that cannot be run, and the lines.
        """
        try:
            process = subprocess.Popen(
                command, cwd=CHECKOUT, env=self.environ | variables, pass_fds=[self.lock], text=True, errors="replace",
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
        except OSError as error:
            return 127, str(error)
        heard_s = time.monotonic()

        def say_that_it_runs() -> None:
            nonlocal heard_s
            while process.poll() is None:
                time.sleep(0.2)
                if time.monotonic() - heard_s >= 10:
                    heard_s = time.monotonic()
                    self.say(f"still {doing} ...")

        threading.Thread(target=say_that_it_runs, daemon=True).start()
        lines = []
        with process:
            try:
                assert process.stdout is not None
                for line in process.stdout:
                    lines.append(line)
                    if quiet or re.match(
                        r"\s*[+~-] |\s*$|Using Python |WARNING: Retrying|WARNING: Location .* is ignored",
                        line,
                    ):
                        continue
                    heard_s = time.monotonic()
                    self.say(line.strip())
            except BaseException:
                process.terminate()
                raise
        return process.returncode, "".join(lines).strip()

    def do(self, *command: str | Path, doing: str, hint: str = "") -> None:
        """Run a command that has to succeed."""
        code, _ = self.run(*command, doing=doing)
        if code:
            shown = " ".join(str(part) for part in command)
            raise InstallError(
                f"`{shown}` ended with {code}, for the reason above{hint}. Where no package was found: is the index of"
                " `pip config list` reachable, and does it take the name and password of its URL? Without uv: see 'With pip alone' in docs/quickstart.md"
            )

    def uv(self, *arguments: str | Path, doing: str = "downloading and installing", hint: str = "") -> None:
        self.do(*self._uv_install(), *arguments, doing=doing, hint=hint)

    def _uv_install(self) -> tuple[str | Path, ...]:
        uv = self.venv / "bin" / "uv"
        return uv, "pip", "install", "--python", self.python, "--no-deps"

    def finds(self, *arguments: str) -> bool:
        """Whether uv finds a package that is not installed, without a word."""
        # A network that swallows what is sent answers never: minutes for uv, which asks four times.
        variables = {"UV_HTTP_TIMEOUT": self.environ.get("UV_HTTP_TIMEOUT", "10"), "UV_HTTP_RETRIES": "1"}
        return (
            self.run(
                *self._uv_install(),
                "--dry-run",
                *arguments,
                doing="looking for PyTorch's build for CPUs",
                quiet=True,
                **variables,
            )[0]
            == 0
        )

    def locked(self, *what: str) -> list[str]:
        """Requirements with hashes of what the lock file has for these extras and groups."""
        command = [
            self.venv / "bin" / "uv",
            "export",
            "--python",
            self.python,
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
        if self.finds("--reinstall-package", "torch", wanted):
            return "cpu", []
        if self.finds("--reinstall-package", "torch", wanted, "--torch-backend", "cpu"):
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
        self.check_room(SIZES_GB[what, "cpu"][1])
        self.install_uv()
        build, options = self.choose_torch(choice)
        gb, disk_gb = SIZES_GB[what, build]
        self.check_room(disk_gb)
        self.say(
            f"Installing into {self.venv.name}: about {gb:.1f} GB to download, {disk_gb:.1f} GB on disk (torch for"
            f" {'CPUs' if build == 'cpu' else 'GPUs'}, native code {'ON' if self.native else 'OFF'})"
        )
        extras = ["--extra", "engine", "--no-dev"] if what == "demo" else ["--all-extras", "--group", "dev"]
        requirements = self.written(what, with_torch(build, self.locked(*extras)))
        builders = self.written("build", self.locked("--only-group", "build"))
        command: list[str | Path] = ["--reinstall-package", "penstock-llm", "-e", "."]
        if what == "demo":  # at once, so that native code is compiled while packages are downloaded
            command += ["--build-constraints", builders, "-r", requirements, *options]
        else:
            # The build of Penstock alone runs in .venv, so that the next one compiles only what has changed, and takes no network.
            self.uv(*options, "-r", builders, "-r", requirements)
            command += ["--no-build-isolation-package", "penstock-llm"]
        for stamp in self.venv.glob(".installed-*"):
            stamp.unlink(missing_ok=True)
        without = "PENSTOCK_NATIVE=OFF leaves it out"
        if self.native:
            self.uv(
                *command,
                doing=f"installing, and compiling native code ({without})",
                hint=f"; if it is native code, {without}",
            )
        else:
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
        self.uv(*options, "-r", self.written("env", with_torch(build, lines)))

    def check_room(self, disk_gb: float) -> None:
        """Check for a first install that the disk has room, and that of uv's cache, whose files are those of .venv on the same disk."""
        if (self.venv / "requirements-build.txt").exists():
            return
        cache = Path(self.environ["UV_CACHE_DIR"])
        places = [self.venv]
        if cache.stat().st_dev != self.venv.stat().st_dev and not (cache / "archive-v0").exists():
            places.append(cache)
        for place in places:
            free_gb = shutil.disk_usage(place).free / 1e9
            if free_gb < disk_gb:
                raise InstallError(
                    f"{place} needs {disk_gb:.1f} GB, and {free_gb:.1f} GB are free there; make room"
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


def problem_of_libc(name: str, version: str) -> str | None:
    """Say why no wheel of uv.lock fits this system, whose C library has this name and version; uv would compile, in Rust too."""
    if name == "glibc" and tuple(map(int, version.split(".")[:2])) >= OLDEST_GLIBC:
        return None
    needed = ".".join(map(str, OLDEST_GLIBC))
    return f"the C library is {name or 'unknown'} {version}; expected glibc {needed} or newer, as on Debian 11, Ubuntu 20.04 and RHEL 9"


def problem_of_port(port: str) -> str | None:
    """Say why nothing can listen on a port of this machine, before minutes are spent on an install."""
    if not port.isascii() or not port.isdigit() or not 0 <= int(port) <= 65535:
        return f"PORT={port}: expected a number from 0 to 65535"
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", int(port)))
        except OSError as error:
            return f"PORT={port}: {os.strerror(error.errno or 0)}; stop what listens there, or choose another, such as PORT=8001"
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
    problem = problem_of_libc(*platform.libc_ver())
    if problem is None and arguments.port is not None:
        problem = problem_of_port(arguments.port)
    if problem:
        sys.exit(f"tools/install.py: {problem}")
    installer = Installer(arguments.venv.absolute(), native=arguments.native == "ON")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and so what it has started ends, too
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        with installer.alone():
            if arguments.what == "env":
                installer.install_env(arguments.files, arguments.torch)
            else:
                installer.install(arguments.what, arguments.torch)
    except (InstallError, OSError) as error:
        sys.exit(f"tools/install.py: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
