"""Docstrings of settings are read from their source."""

from penstock.core.config import Config, field_docs


class _Base(Config):
    limit: int = 3
    """Limit of
    the base."""
    bare: int = 0


class _Settings(_Base):
    """Not a field's docstring."""

    size_gb: float
    """Size in GB."""
    limit: int = 4
    """Limit of the class itself."""

    def unrelated(self) -> None:
        """Not a field's docstring either."""


def test_fields_have_the_docstring_below_them_and_the_nearest_class_wins() -> None:
    assert field_docs(_Settings) == {"size_gb": "Size in GB.", "limit": "Limit of the class itself."}
    assert field_docs(_Base) == {"limit": "Limit of\nthe base."}
