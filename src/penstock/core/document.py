"""Strict YAML: a duplicate key is an error, and every error has its line."""

import math
from collections.abc import Hashable
from itertools import chain
from typing import Any

import pydantic
import yaml

from penstock.core.config import Path, section_of, wrong
from penstock.core.errors import ConfigError

_DEPTH_MAX = 32
_PARTS_MAX = 10_000
_VALUES_MAX = 100_000
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # a tenth of the time, where libyaml is there


def parse_yaml(text: str, *, source: str, is_file: bool = True) -> Any:
    """Parse one YAML document to plain data.

    Args:
        text: the document.
        source: file or flag named in errors.
        is_file: errors give line and column; False for a flag's value.

    Raises:
        ConfigError: invalid YAML or a duplicate key; one line, with the place.
    """
    try:
        return yaml.load(text, Loader=_StrictLoader)  # noqa: S506 - derived from SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"{source}:{_place(mark, text)}" if mark and is_file else source
        raise ConfigError(f"{place}: {error.problem or error.context or 'not valid YAML'}") from error
    except RecursionError as error:
        raise ConfigError(f"{source}: nested too deeply; expected a few levels") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: e.g. the date 2026-02-30
        raise ConfigError(f"{source}: not valid YAML: {' '.join(str(error).split())}") from error


def _place(mark: yaml.Mark, text: str) -> str:
    lines = text.split("\n")
    if mark.line < len(lines):
        return f"{mark.line + 1}:{mark.column + 1}"
    return f"{len(lines)}:{len(lines[-1]) + 1}"  # libyaml counts a line break at the end where there is none


def check_plain(data: dict[str, Any], *, use: str) -> None:
    """Check, for a field's validator, that a mapping is plain data of bounded size.

    Args:
        data: the field's value.
        use: what the data are for, as `which go to a worker as JSON`.

    Raises:
        PydanticCustomError: they are not.
    """
    level: list[Any] = [data]
    for _ in range(_DEPTH_MAX):
        inner = [each.values() if isinstance(each, dict) else each for each in level]
        if sum(map(len, inner)) > _VALUES_MAX:  # YAML's anchors repeat parts within parts
            raise wrong(f"too many values within each other; at most {_VALUES_MAX} of a level")
        for part in chain.from_iterable(inner):
            is_plain = part is None or isinstance(part, dict | list | tuple | str | int | float)
            if not is_plain or (isinstance(part, float) and not math.isfinite(part)):
                raise wrong(
                    f"must be of text, finite numbers, true, false, null, lists and mappings, {use}, got {part!r}; write it as text"
                    " in quotes"
                )
        level = [part for parts in inner for part in parts if isinstance(part, dict | list | tuple)]
        if not level:
            return
        if len(level) > _PARTS_MAX:
            raise wrong(f"too many lists and mappings within each other; at most {_PARTS_MAX} of a level")
    raise wrong(f"nested too deeply; at most {_DEPTH_MAX} levels are taken")


def empty_section(text: str, config: type[pydantic.BaseModel]) -> Path | None:
    """Return the path of the first section that a document names and leaves empty, such as `planner:` alone.

    YAML reads such a section as null, which means left out; who wrote its name expects it to be there. An explicit `null` is fine.

    Args:
        text: a document that `parse_yaml` has read.
        config: the document's settings.
    """
    return _empty_in(yaml.compose(text, Loader=_Loader), config)


def _empty_in(node: yaml.Node | None, config: type[pydantic.BaseModel]) -> Path | None:
    if not isinstance(node, yaml.MappingNode):
        return None
    for key, value in node.value:
        section = section_of(config, key.value) if isinstance(key, yaml.ScalarNode) else None
        if section is None:
            continue
        if isinstance(value, yaml.ScalarNode) and not value.value and not value.style:
            return (key.value,)
        if inner := _empty_in(value, section):
            return (key.value, *inner)
    return None


class _StrictLoader(_Loader):  # type: ignore[misc]
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:  # noqa: FBT001, FBT002 - as its base
        seen: dict[Any, int] = {}
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            if not isinstance(key_node, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(
                    problem=f"a key must be a word, not a {key_node.id}", problem_mark=key_node.start_mark
                )
            line = key_node.start_mark.line + 1
            if key_node.value in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"key {key_node.value!r} is written twice, first in line {seen[key_node.value]};"
                    " keep one",
                    problem_mark=key_node.start_mark,
                )
            seen[key_node.value] = line
        mapping: dict[Hashable, Any] = super().construct_mapping(node, deep)
        return mapping
