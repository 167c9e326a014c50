"""Splitting KV heads into retrieval and streaming heads by a table of gates.

A table is a text file of one line per layer and one number per KV head, separated by tabs, as
DuoAttention publishes them: high = needs long-range context. A name instead of a path means a
table kept here for the model, made by `python -m eval.methods.proxies`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flexicache_hf.models.kv_heads import kv_heads

TABLES = Path(__file__).parent / "tables"
PROXIES = ("proxy-decay", "proxy-error")


def load_gates(gates: str, config: Any) -> np.ndarray:
    """The table `gates` (a path, or the name of a proxy) for the model of `config`, `[L, H_kv]`.

    Raises:
        ValueError: there is no such table, or it is not of this model's shape.
    """
    text = config.get_text_config(decoder=True)
    if text.is_heterogeneous:
        raise ValueError(
            f"the layers of this {text.model_type} differ in their KV heads, and a table of gates "
            "has as many columns for each: choose a method without gates"
        )
    path = Path(gates)
    if gates in PROXIES:
        path = TABLES / f"{model_slug(config)}.{gates}.tsv"
    if not path.is_file():
        known = sorted(p.name for p in TABLES.glob("*.tsv"))
        raise ValueError(
            f"gates is {gates!r}, but there is no file {path}; tables kept here: {known}. Give the "
            "path of a table, or make one with `python -m eval.methods.proxies`"
        )
    table = np.loadtxt(path, delimiter="\t", ndmin=2)
    shape = (text.num_hidden_layers, kv_heads(text))
    if table.shape != shape:
        raise ValueError(
            f"{path} has {table.shape[0]} layers of {table.shape[1]} heads, but the model has "
            f"{shape[0]} of {shape[1]} KV heads: it was made for another model"
        )
    return table


def model_slug(config: Any) -> str:
    return Path(config._name_or_path).name.lower()


def retrieval_heads(gates: np.ndarray, sparsity: float, seed: int = 0) -> Tensor:
    """Bool `[L, H_kv]`: all but the `sparsity` lowest gates of the whole model.

    Gates are clipped to [0, 1] and ties broken by noise of 1e-6, as in LServe; the seed is fixed.
    """
    if not 0 <= sparsity <= 1:
        raise ValueError(f"sparsity is {sparsity}, expected 0 to 1: the part of streaming heads")
    noise = np.random.default_rng(seed).uniform(0, 1e-6, gates.shape)
    order = (gates.clip(0, 1) + noise).ravel().argsort()
    retrieval = np.ones(gates.size, dtype=bool)
    retrieval[order[: round(sparsity * gates.size)]] = False
    return torch.from_numpy(retrieval.reshape(gates.shape))
