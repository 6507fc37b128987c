"""`penstock --help` in groups, and completion of a shell: both know every command."""

import subprocess

import pytest

from penstock import cli
from penstock.cli.completion import loaded
from penstock.engine.registry import engine_names
from penstock.router.policies import POLICIES


def parsers():
    return {" ".join(path): parser for path, parser in loaded(cli.make_parser())}


def commands():
    return [path for path in parsers() if path and " " not in path]


def choices(command, flag):
    (action,) = (each for each in parsers()[command]._actions if flag in each.option_strings)
    return set(action.choices)


def complete(script, *words):
    """Ask bash what it offers for the last word."""
    line = " ".join(f'"{word}"' for word in ("penstock", *words))
    done = subprocess.run(
        [
            "bash",
            "-c",
            f'{script}\nCOMP_WORDS=({line}); COMP_CWORD={len(words)}; _shtab_penstock; echo "${{COMPREPLY[@]}}"',
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


def test_bash_completes_commands_flags_and_values(capsys):
    assert cli.main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    assert set(complete(script, "")) >= set(commands())
    assert set(complete(script, "pla")) == {"plan", "planner"}
    assert complete(script, "planner", "lo") == ["log"]
    assert "--max-workers" in complete(script, "serve", "--max")
    assert "--prefill" in complete(script, "serve", "some/model", "--pre")
    assert complete(script, "serve", "--log-level", "w") == ["warning"]
    assert "--follow" in complete(script, "planner", "log", "--f")
    assert complete(script, "serve", "--nothing") == []


def test_every_built_in_engine_and_policy_is_offered():
    assert choices("serve", "--engine") == set(engine_names())
    assert choices("serve", "--policy") == set(POLICIES)


def test_flags_of_a_late_import_are_offered():
    assert {"--url", "--rate", "--json"} <= parsers()["bench serve"]._option_string_actions.keys()
    assert choices("bench serve", "--endpoint") == {"chat", "completions"}
