"""What `penstock scale` says of roles that are not of this deployment."""

import pytest

from penstock import cli


@pytest.mark.parametrize(
    ("role", "count", "command"),
    [
        ("eu/decode", "4", "penstock scale decode 4"),
        ("link-eu", None, "penstock scale ROLE N"),
        ("link-eu/prefill", "2", "penstock scale prefill 2"),
        ("eu/nonsense", "2", "penstock scale ROLE 2"),
    ],
)
def test_a_role_of_another_region_is_scaled_on_its_hosts(capsys, role, count, command):
    assert cli.main(["scale", role, *([] if count is None else [count])]) == 2
    said = capsys.readouterr().err
    assert "of region 'eu'" in said
    assert f"run {command} on one of its hosts" in said


def test_an_unknown_role_is_named_with_the_nearest(capsys):
    assert cli.main(["scale", "decoded", "4"]) == 2
    assert "unknown 'decoded'" in capsys.readouterr().err
