"""`penstock --help` in groups, and completion of a shell: both know every command."""

import subprocess

import pytest

from penstock import cli
from penstock.cli.completion import nodes_of
from penstock.engine.registry import engine_names
from penstock.router.policy.policies import POLICIES


def commands():
    (root, *_) = nodes_of(cli.make_parser())
    return list(root.commands)


def complete(script, *words):
    """Ask bash what it offers for the last word."""
    line = " ".join(f'"{word}"' for word in ("penstock", *words))
    done = subprocess.run(
        [
            "bash",
            "-c",
            f'{script}\nCOMP_WORDS=({line}); COMP_CWORD={len(words)}; _penstock; echo "${{COMPREPLY[@]}}"',
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


def test_help_lists_every_command_once_in_a_group(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    said = capsys.readouterr().out
    assert len(commands()) > 15
    for name in commands():
        (line,) = (line for line in said.splitlines() if line.startswith(f"  {name} "))
        assert len(line.split(maxsplit=1)[1]) > 10, line
    assert [line for line in said.splitlines() if line.endswith(":")][:2] == ["Serve:", "Watch:"]
    assert all(len(line) <= 100 for line in said.splitlines())


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_bash_and_zsh_complete_commands_flags_and_values(shell, capsys):
    assert cli.main(["completion", shell]) == 0
    script = "\n".join(
        line for line in capsys.readouterr().out.splitlines() if "autoload" not in line
    )  # zsh's own
    assert set(complete(script, "")) >= set(commands())
    assert set(complete(script, "pla")) == {"plan", "planner"}
    assert complete(script, "planner", "lo") == ["log"]
    assert "--max-workers" in complete(script, "serve", "--max")
    assert "--prefill" in complete(script, "serve", "some/model", "--pre")
    assert complete(script, "serve", "--log-level", "w") == ["warning"]
    assert "--follow" in complete(script, "planner", "log", "--f")
    assert complete(script, "serve", "--nothing") == []


def test_fish_has_a_line_for_every_command_and_flag(capsys):
    assert cli.main(["completion", "fish"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name in commands():
        assert any(
            line.startswith("complete -c penstock -n '__fish_use_subcommand'") and f" -a {name} " in line
            for line in lines
        )
    assert any("__fish_seen_subcommand_from serve' -l max-workers" in line for line in lines)
    assert any("from planner; and __fish_seen_subcommand_from log' -l follow" in line for line in lines)


def test_every_built_in_engine_and_policy_is_offered():
    (serve,) = (node for node in nodes_of(cli.make_parser()) if node.path == ("serve",))
    assert set(serve.values["--engine"]) == set(engine_names())
    assert set(serve.values["--policy"]) == set(POLICIES)


def test_flags_of_a_late_import_are_offered():
    (bench,) = (node for node in nodes_of(cli.make_parser()) if node.path == ("bench", "serve"))
    assert {"--url", "--rate", "--json"} <= bench.flags.keys()
    assert set(bench.values["--endpoint"]) == {"chat", "completions"}
