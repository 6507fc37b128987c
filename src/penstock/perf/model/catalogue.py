"""Shapes of known models, to plan and simulate without a checkpoint."""

import json
from importlib.resources import files
from pathlib import Path

from penstock.core.config import nearest
from penstock.core.errors import ConfigError
from penstock.perf.model.model_config import load_shape, shape_of
from penstock.perf.model.shape import ModelShape

_DATA = files("penstock.perf") / "data"


def known_shapes() -> list[str]:
    """List the names of the shapes in the package."""
    return sorted(
        entry.name.removesuffix(".json") for entry in _DATA.iterdir() if entry.name.endswith(".json")
    )


def find_shape(model: str, *, beside: Path | None = None) -> ModelShape:
    """Load a model's shape by known name, or from a directory or file with its `config.json`.

    Args:
        model: the graph's `model`.
        beside: second base of relative paths, such as the graph's directory.

    Raises:
        ConfigError: neither; suggests the nearest known name.
    """
    if model in known_shapes():
        text = (_DATA / f"{model}.json").read_text(encoding="utf-8")
        return shape_of(json.loads(text), name=model, source=f"{model}.json")
    for path in (Path(model).expanduser(), (beside or Path()) / model):
        if path.exists():
            return load_shape(path)
    raise ConfigError(
        f"model {model}: its shape is not known{nearest(model, known_shapes())}; or give a directory with a config.json"
    )
