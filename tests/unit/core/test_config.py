from typing import Literal

import pydantic
import pytest
import yaml

from penstock.core.config import Config, known_keys, nearest, wrong
from penstock.core.errors import ConfigError


class Wheel(Config):
    diameter_m: float = pydantic.Field(1.0, gt=0)
    material: Literal["wood", "steel"] = "steel"


class Mill(Config):
    wheels: tuple[Wheel, ...] = ()
    main: Wheel | None = None
    name: str

    @pydantic.field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if name == "dry":
            raise wrong("a mill named 'dry' has no water")
        return name


def lines_of(data: object) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        Mill.parse(data, source="mill.yaml")
    return caught.value.message.splitlines()


def test_valid_data_becomes_a_frozen_config() -> None:
    mill = Mill.parse({"name": "north", "main": {"diameter_m": 2}}, source="mill.yaml")
    assert mill.main == Wheel(diameter_m=2)
    with pytest.raises(pydantic.ValidationError):
        mill.name = "south"  # type: ignore[misc]


def test_every_mistake_is_one_line_with_its_path_and_value() -> None:
    data = {"main": {"diameter_m": -1, "material": "straw"}, "wheels": [{"diameter_m": "wide"}]}
    assert lines_of(data) == [
        "mill.yaml: wheels.0.diameter_m: must be a valid number, got 'wide'",
        "mill.yaml: main.diameter_m: must be > 0.0, got -1",
        "mill.yaml: main.material: must be one of 'wood' or 'steel', got 'straw'",
        "mill.yaml: name: missing; it has no default",
    ]


def test_numbers_and_lists_that_are_none_are_said_plainly() -> None:
    class Weir(Config):
        gates: int = 1
        height_m: float | None = None
        open: bool = False
        rivers: tuple[str, ...] = pydantic.Field(("Isar",), min_length=1)

    with pytest.raises(ConfigError) as caught:
        Weir.parse({"gates": True, "height_m": False, "open": True, "rivers": []}, source="weir.yaml")
    assert caught.value.message.splitlines() == [
        "weir.yaml: gates: must be a number, got true",
        "weir.yaml: height_m: must be a number, got false",
        "weir.yaml: rivers: must have at least 1 item, got []",
    ]
    with pytest.raises(ConfigError, match=r"weir\.yaml: gates: must be a valid integer, got 1\.5$"):
        Weir.parse({"gates": 1.5}, source="weir.yaml")
    assert Weir.parse({"open": True}, source="weir.yaml").open


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("1e9", "; YAML reads it as text: write 1000000000"),
        ("1.5e3", "; YAML reads it as text: write 1500"),
        ("1.55e1", ""),
        ("1e-3", ""),
        ("1e999", ""),
        ("nine", ""),
    ],
)
def test_a_number_that_yaml_reads_as_text_is_told_from_other_text(text: str, hint: str) -> None:
    class Weir(Config):
        gates: int = 1

    assert yaml.safe_load(text) == text
    with pytest.raises(ConfigError) as caught:
        Weir.parse({"gates": text}, source="weir.yaml")
    assert caught.value.message == f"weir.yaml: gates: must be a valid integer, got {text!r}{hint}"


def test_unknown_keys_name_the_nearest_known_one() -> None:
    data = {"name": "north", "wheels": [{"diamter_m": 1}], "main": {"zzz": 1}, "nmae": 1}
    assert lines_of(data) == [
        "mill.yaml: wheels.0.diamter_m: unknown key; did you mean 'diameter_m'?",
        "mill.yaml: main.zzz: unknown key; known: diameter_m, material",
        "mill.yaml: nmae: unknown key; did you mean 'name'?",
    ]


def test_a_worded_error_stands_alone_and_a_mapping_is_not_echoed() -> None:
    assert lines_of({"name": "dry"}) == ["mill.yaml: name: a mill named 'dry' has no water"]
    assert lines_of({"name": {"a": 1}}) == ["mill.yaml: name: must be a valid string, got a mapping"]
    assert lines_of([]) == ["mill.yaml: must be a mapping, got []"]
    assert lines_of(None) == ["mill.yaml: is empty; must be a mapping"]


def test_the_source_may_depend_on_the_path() -> None:
    with pytest.raises(ConfigError, match=r"^--set: main\.diameter_m: must be > 0"):
        Mill.parse(
            {"name": "north", "main": {"diameter_m": 0}},
            source=lambda path: "--set" if path[:1] == ("main",) else "mill.yaml",
        )


def test_known_keys_follow_collections_and_optional_models() -> None:
    assert known_keys(Mill, ()) == ["wheels", "main", "name"]
    assert known_keys(Mill, ("wheels", 3)) == known_keys(Mill, ("main",)) == ["diameter_m", "material"]
    assert known_keys(Mill, ("name",)) == []


def test_of_equally_near_names_the_longest_common_prefix_wins() -> None:
    assert nearest("max_completion_tokens", ["min_tokens", "max_tokens"]) == "; did you mean 'max_tokens'?"
