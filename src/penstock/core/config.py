"""Base class of all settings: frozen; an error names the path of each mistake and the known key nearest to an unknown one."""

import ast
import difflib
import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from itertools import pairwise, takewhile
from types import NoneType
from typing import Annotated, Any, ClassVar, Self, get_args

import pydantic
from pydantic_core import ErrorDetails, PydanticCustomError

from penstock.core.errors import ConfigError

Path = tuple[int | str, ...]
ListenHost = Annotated[str, pydantic.AfterValidator(lambda host: re.sub(r"^\[(.*)\]$", r"\1", host))]
"""An address to listen on; an IPv6 one may stand in brackets, as in URLs."""


class Config(pydantic.BaseModel):
    """A package's settings: at most a dozen fields, each with its unit and a description.

    A description is the docstring below its field, which `field_docs` reads.
    """

    not_here: ClassVar[dict[str, str]] = {}
    """Keys that users may expect in this section -> hint where the setting is."""

    model_config = pydantic.ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        allow_inf_nan=False,  # JSON has no word for them
    )

    @pydantic.field_validator("*", mode="before")
    @classmethod
    def _no_bool_for_number(cls, value: Any, info: pydantic.ValidationInfo) -> Any:
        """Refuse true and false where a number is expected: pydantic takes them for 1 and 0, and YAML reads `yes` as true."""
        if isinstance(value, bool) and info.field_name is not None:
            annotation = cls.model_fields[info.field_name].annotation
            if set(get_args(annotation) or (annotation,)) - {NoneType} <= {int, float}:
                raise wrong(f"must be a number, got {str(value).lower()}")
        return value

    @classmethod
    def parse(cls, data: Any, *, source: str | Callable[[Path], str]) -> Self:
        """Validate plain data.

        Args:
            data: parsed YAML or JSON.
            source: the file or flag to name in errors, or a function from a path to that name.

        Raises:
            ConfigError: one line per mistake, `source: path: what is wrong`.
        """
        try:
            return cls.model_validate(data)
        except pydantic.ValidationError as error:
            raise config_error(cls, error, source) from error


def config_error(
    config: type[Config], error: pydantic.ValidationError, source: str | Callable[[Path], str]
) -> ConfigError:
    """Turn a pydantic error into a `ConfigError`, one line per mistake."""
    return ConfigError("\n".join(_explain(config, error, source)))


def wrong(message: str) -> PydanticCustomError:
    """Make an error for a validator to raise; `message` is shown as it is and has to include the bad value."""
    return PydanticCustomError(_WORDED, "{message}", {"message": message})


_WORDED = "worded"
_EXPONENT = re.compile(r"[0-9]{1,6}(\.[0-9]{1,6})?[eE]\+?1?[0-9]")
_KEY = "[key]"
"""How pydantic says that the key of a mapping is wrong, not its value."""


def _explain(
    config: type[pydantic.BaseModel], error: pydantic.ValidationError, source: str | Callable[[Path], str]
) -> Iterator[str]:
    for item in error.errors(include_url=False):
        path = item["loc"]
        if path and path[-1] == _KEY:
            path = path[:-1]
        where = source if isinstance(source, str) else source(path)
        where += f": {'.'.join(str(part) for part in path)}" if path else ""
        if item["type"] == "extra_forbidden":
            yield f"{where}: unknown key{_hint(config, path)}"
        elif item["type"] == "missing":
            yield f"{where}: missing; it has no default"
        else:
            yield f"{where}: {_wording(item)}"


def _hint(config: type[pydantic.BaseModel], path: Path) -> str:
    key, holder = str(path[-1]), _model_at(config, path[:-1])
    if holder is not None and issubclass(holder, Config) and key in holder.not_here:
        return f"; {holder.not_here[key]}"
    return nearest(key, known_keys(config, path[:-1]))


_BOUNDS = {
    "greater_than_equal": ("must be >= ", "ge"),
    "greater_than": ("must be > ", "gt"),
    "less_than_equal": ("must be <= ", "le"),
    "less_than": ("must be < ", "lt"),
    "literal_error": ("must be one of ", "expected"),
    "enum": ("must be one of ", "expected"),
}


def _wording(item: ErrorDetails) -> str:
    if item["type"] == _WORDED:
        return item["msg"]
    is_mapping = item["type"] in {"model_type", "model_attributes_type"}
    if is_mapping and item["input"] is None:
        return "is empty; must be a mapping"
    if item["type"] in _BOUNDS:
        text, limit = _BOUNDS[item["type"]]
        message = f"{text}{item['ctx'][limit]}"
    elif is_mapping:
        message = "must be a mapping"
    elif item["type"] == "int_from_float":
        message = "must be a valid integer"
    elif item["type"] == "too_short":
        number = item["ctx"]["min_length"]
        message = f"must have at least {number} {'item' if number == 1 else 'items'}"
    else:
        message = item["msg"].partition(", unable to")[0].removeprefix("Value error, ").removeprefix("Input ")
        message = message.replace("should", "must", 1).replace("a valid tuple", "a list")
        message = message[:1].lower() + message[1:]
    value = item["input"]
    shown = "a mapping" if isinstance(value, (dict, pydantic.BaseModel)) else repr(value)
    return f"{message}, got {shown}{_exponent_hint(item)}"


def _exponent_hint(item: ErrorDetails) -> str:
    """Say of `1e9` where an integer is expected that YAML takes only `1.0e+9` for a number."""
    value = item["input"]
    if item["type"] != "int_parsing" or not isinstance(value, str) or not _EXPONENT.fullmatch(value):
        return ""
    number = float(value)
    return f"; YAML reads it as text: write {int(number)}" if number.is_integer() else ""


def closest(word: str, known: list[str]) -> str | None:
    """Give the known name most like an unknown one, of equals that with the longest common prefix; None if none is close."""

    def likeness(name: str) -> tuple[float, int]:
        prefix = takewhile(lambda pair: pair[0] == pair[1], zip(name, word, strict=False))
        return difflib.SequenceMatcher(None, name, word).ratio(), len(list(prefix))

    return max(difflib.get_close_matches(word, known), key=likeness, default=None)


def nearest(word: str, known: list[str]) -> str:
    """Give the hint that ends an error about an unknown name: the closest known name, or all of them."""
    if close := closest(word, known):
        return f"; did you mean {close!r}?"
    return f"; known: {', '.join(sorted(known))}" if known else ""


def known_keys(config: type[pydantic.BaseModel], path: Path) -> list[str]:
    """List the fields allowed at `path` below `config`."""
    model = _model_at(config, path)
    return [] if model is None else list(model.model_fields)


def section_of(config: type[pydantic.BaseModel], key: str) -> type[pydantic.BaseModel] | None:
    """Give the settings that a field holds; None if it holds none, or there is no such field."""
    field = config.model_fields.get(key)
    return None if field is None else next(_models_in(field.annotation), None)


def _model_at(config: type[pydantic.BaseModel], path: Path) -> type[pydantic.BaseModel] | None:
    for part in path:
        field = config.model_fields.get(str(part))
        if field is None:  # a list index or dict key; `config` is already the model of the items
            continue
        inner = next(_models_in(field.annotation), None)
        if inner is None:
            return None
        config = inner
    return config


def _models_in(annotation: Any) -> Iterator[type[pydantic.BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        yield annotation
    for argument in getattr(annotation, "__args__", ()):
        yield from _models_in(argument)


@functools.cache
def field_docs(config: type[pydantic.BaseModel]) -> dict[str, str]:
    """Give field name -> its docstring, those of base classes included.

    pydantic can do so for every class when it is defined, which was a sixth of the time to import all settings.
    """
    found: dict[str, str] = {}
    for base in reversed(config.__mro__):
        if issubclass(base, pydantic.BaseModel) and base is not pydantic.BaseModel:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
            body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
            found.update(_docs_in(body))
    return {name: found[name] for name in config.model_fields if name in found}


def _docs_in(body: list[ast.stmt]) -> dict[str, str]:
    return {
        field.target.id: inspect.cleandoc(doc.value.value)
        for field, doc in pairwise(body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(doc, ast.Expr)
        and isinstance(doc.value, ast.Constant)
        and isinstance(doc.value.value, str)
    }
