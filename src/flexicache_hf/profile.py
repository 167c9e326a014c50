"""Head profiles: which KV heads of a model are unstable (section 3 of the paper).

A profile is data. It is written and read as JSON, never unpickled, and checked against the model.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FILE_NAME = "head_profile.json"
SCHEMA = 1


@dataclass(frozen=True)
class HeadProfile:
    """The unstable KV heads of one model, as sorted `(layer, kv_head)` pairs."""

    num_layers: int
    num_kv_heads: int
    unstable_heads: tuple[tuple[int, int], ...]
    provenance: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_unstable_heads(
        cls, config: Any, heads: Iterable[tuple[int, int]], **provenance: Any
    ) -> HeadProfile:
        text = config.get_text_config(decoder=True)
        kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        pairs = tuple(sorted({(int(layer), int(head)) for layer, head in heads}))
        profile = cls(text.num_hidden_layers, kv_heads, pairs, provenance)
        profile.check(config)
        return profile

    def check(self, config: Any) -> None:
        """Raises ValueError unless this profile fits the model of `config`."""
        text = config.get_text_config(decoder=True)
        kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        for name, found, expected in (
            ("num_layers", self.num_layers, text.num_hidden_layers),
            ("num_kv_heads", self.num_kv_heads, kv_heads),
        ):
            if found != expected:
                raise ValueError(
                    f"profile.{name} is {found}, but the model has {expected}: "
                    "this profile was made for another model"
                )
        for layer, head in self.unstable_heads:
            if not (0 <= layer < self.num_layers and 0 <= head < self.num_kv_heads):
                raise ValueError(
                    f"profile.unstable_heads names (layer {layer}, KV head {head}), but the model "
                    f"has layers 0..{self.num_layers - 1} and KV heads 0..{self.num_kv_heads - 1}"
                )

    def unstable_in(self, layer: int) -> tuple[int, ...]:
        """KV heads of `layer` that are unstable, ascending."""
        return tuple(head for at, head in self.unstable_heads if at == layer)

    def save_pretrained(self, directory: str | Path) -> Path:
        path = Path(directory) / FILE_NAME
        path.parent.mkdir(parents=True, exist_ok=True)
        document = {
            "schema": SCHEMA,
            "num_layers": self.num_layers,
            "num_kv_heads": self.num_kv_heads,
            "unstable_heads": [list(pair) for pair in self.unstable_heads],
            "provenance": self.provenance,
        }
        path.write_text(json.dumps(document, indent=1) + "\n")
        return path

    @classmethod
    def from_pretrained(cls, source: str | Path) -> HeadProfile:
        path = Path(source)
        document = json.loads((path / FILE_NAME if path.is_dir() else path).read_text())
        heads = tuple((int(layer), int(head)) for layer, head in document["unstable_heads"])
        return cls(
            document["num_layers"], document["num_kv_heads"], heads, document.get("provenance", {})
        )
