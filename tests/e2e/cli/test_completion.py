"""Completion in real shells: a Tab in zsh, and what fish offers."""

import os
import subprocess
import sys

import pytest

from tests.support.terminal import terminal

OFFERED = [
    ("planner lo", "planner log"),
    ("serve --max", "serve --max-workers"),
    ("serve --engine vl", "serve --engine vllm"),
    ("bench serve --concurr", "bench serve --concurrency"),
]


@pytest.fixture
def script(tmp_path):
    """Give a function that writes a shell's script."""

    def write(shell):
        file = tmp_path / f"penstock.{shell}"
        command = [sys.executable, "-m", "penstock", "completion", shell]
        file.write_bytes(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
        return file

    return write


@pytest.mark.needs("zsh")
def test_zsh_completes_without_other_settings(script, tmp_path):
    file = script("zsh")
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "ZDOTDIR": str(tmp_path)}
    with terminal("zsh", "-f", "-i", environment=environment) as shell:
        shell.type(f"PS1=; source {file}; print sourced=$?\n")
        shell.until("\nsourced=0")
        for number, (typed, whole) in enumerate(OFFERED):
            shell.type(f"penstock {typed}\t\t")  # the first Tab may list a flag with its help
            shell.until(whole)
            shell.type(f"\x15print line={number}\n")  # Ctrl-U forgets the line
            assert "command not found" not in shell.until(f"\nline={number}")


@pytest.mark.needs("fish")
def test_fish_completes(script):
    file = script("fish")
    for typed, whole in OFFERED:
        ask = f"source {file}; complete -C 'penstock {typed}'"
        said = subprocess.run(["fish", "--no-config", "-c", ask], check=True, capture_output=True, text=True)
        offered = [line.split("\t")[0] for line in said.stdout.splitlines()]
        assert offered == [whole.split()[-1]], (typed, said)
