"""Shapes of known models, so that one can be priced and simulated without its checkpoint."""

import json
from importlib.resources import files
from pathlib import Path

from penstock.core.config import nearest
from penstock.core.errors import ConfigError
from penstock.perf.model.model_config import load_shape, shape_of
from penstock.perf.model.shape import ModelShape

_DATA = files("penstock.perf") / "data"


def known_shapes() -> list[str]:
    """Name the shapes that come with the package."""
    return sorted(
        entry.name.removesuffix(".json") for entry in _DATA.iterdir() if entry.name.endswith(".json")
    )


def find_shape(model: str, *, beside: Path | None = None) -> ModelShape:
    """Find a model's shape: a known name, or a directory or file that holds its `config.json`.

    Args:
        model: as a graph names it.
        beside: where relative paths also start, such as the directory of the graph.

    Raises:
        ConfigError: neither; names the nearest known shape.
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
