"""Base of everything a human writes: frozen, every mistake reported with its path, unknown keys with the nearest known one."""

import difflib
from collections.abc import Iterator
from typing import Any, Self

import pydantic

from penstock.core.errors import ConfigError


class Config(pydantic.BaseModel):
    """A package's settings: at most a dozen fields, each with its unit and a description."""

    model_config = pydantic.ConfigDict(
        frozen=True, extra="forbid", validate_default=True, use_attribute_docstrings=True
    )

    @classmethod
    def parse(cls, data: Any, *, source: str) -> Self:
        """Validate plain data.

        Args:
            data: what YAML or JSON gave.
            source: the file or flag to name in errors.

        Raises:
            ConfigError: one line per mistake, `source: path: what is wrong`.
        """
        try:
            return cls.model_validate(data)
        except pydantic.ValidationError as error:
            raise ConfigError("\n".join(_explain(cls, error, source))) from error


def _explain(config: type[pydantic.BaseModel], error: pydantic.ValidationError, source: str) -> Iterator[str]:
    for item in error.errors(include_url=False):
        path = ".".join(str(part) for part in item["loc"]) or "(top level)"
        if item["type"] == "extra_forbidden":
            known = known_keys(config, item["loc"][:-1])
            yield f"{source}: {path}: unknown key{nearest(str(item['loc'][-1]), known)}"
        elif item["type"] == "missing":
            yield f"{source}: {path}: missing; it has no default"
        else:
            message = item["msg"][:1].lower() + item["msg"][1:].removeprefix("alue error, ")
            yield f"{source}: {path}: {message}, got {item['input']!r}"


def nearest(word: str, known: list[str]) -> str:
    """Word the hint that ends an error about an unknown name."""
    close = difflib.get_close_matches(word, known, n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known: {', '.join(sorted(known))}" if known else ""


def known_keys(config: type[pydantic.BaseModel], path: tuple[int | str, ...]) -> list[str]:
    """List the fields allowed at `path` below `config`."""
    for part in path:
        field = config.model_fields.get(str(part))
        candidates = [field.annotation] if field else [f.annotation for f in config.model_fields.values()]
        inner = next((m for c in candidates for m in _models_in(c)), None)
        if inner is None:
            return []
        config = inner
    return list(config.model_fields)


def _models_in(annotation: Any) -> Iterator[type[pydantic.BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        yield annotation
    for argument in getattr(annotation, "__args__", ()):
        yield from _models_in(argument)
