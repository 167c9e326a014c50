"""Loading the model under evaluation, and what identifies it in results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flexicache_hf.models.kv_heads import kv_heads

EMBEDDED, STAND_IN = "embedded", "stand-in:"


def load(name: str, dtype: str = "auto", device: str | None = None) -> tuple[Any, Any]:
    """`(model, tokenizer)`: a Hub id or folder, `embedded` (SmolLM2-135M-Instruct), or
    `stand-in:TYPE`, a tiny random model of that model type. The device `auto` spreads a Hub model
    over all there are."""
    if name.startswith(STAND_IN):
        from eval.stand_in import byte_tokenizer, tiny_model

        model, tokenizer = tiny_model(name.removeprefix(STAND_IN)), byte_tokenizer()
        model.config._name_or_path = name
    elif name == EMBEDDED:
        from flexicache_hf.models.embedded import load_model

        model, tokenizer = load_model(**({} if dtype == "auto" else {"dtype": dtype}))
    else:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        spread = {"device_map": "auto"} if device == "auto" else {}
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, **spread).eval()
        tokenizer = AutoTokenizer.from_pretrained(name)
    return (model if device == "auto" else model.to(device or "cpu")), tokenizer


def identity(model: Any) -> dict[str, Any]:
    """Name, revision, type, dtype and shape of a model."""
    config = model.config
    text = config.get_text_config(decoder=True)
    name = config._name_or_path
    return {
        "name": Path(name).name if Path(name).is_dir() else name,
        "revision": getattr(config, "_commit_hash", None),
        "type": config.model_type,
        "dtype": str(model.dtype).removeprefix("torch."),
        "layers": text.num_hidden_layers,
        "query_heads": text.num_attention_heads,
        "kv_heads": kv_heads(text),
    }


def context_length(model: Any) -> int:
    """Positions the model was made for."""
    return int(model.config.get_text_config(decoder=True).max_position_embeddings)
