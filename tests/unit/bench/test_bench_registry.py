import pytest

from penstock import cli
from penstock.bench.registry import BENCHES


@pytest.mark.parametrize("name", BENCHES.modules)
def test_every_bench_explains_its_arguments(name, capsys):
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["bench", name, "--help"])
    assert exit_info.value.code == 0
    assert "--quick" in capsys.readouterr().out


def test_an_experiment_is_no_bench_of_users(capsys):
    assert cli.main(["bench", "hashing"]) == 2
    assert "invalid choice: 'hashing'" in capsys.readouterr().err
