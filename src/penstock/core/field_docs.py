"""Reads the docstrings below a settings class's fields from its source, for tables and schemas."""

import ast
import inspect
import textwrap
from itertools import pairwise

import pydantic


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
