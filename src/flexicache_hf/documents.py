"""A real document that every Python installation carries: its own language reference."""

from __future__ import annotations

from pydoc_data.topics import topics  # type: ignore[import-not-found, unused-ignore]


def reference_text() -> str:
    """The topics of the language reference, one after the other (about 100,000 tokens)."""
    return "\n\n".join(topics[name].strip() for name in sorted(topics))
