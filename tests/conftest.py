"""Tiny random models, and what every test shares."""

from __future__ import annotations

import os
import warnings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from hypothesis import HealthCheck, settings

from flexicache_hf.models import embedded

settings.register_profile(
    "default",
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("default")
torch.set_num_threads(1)  # tiny models lose more to threads than they gain


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
    warnings.filterwarnings("ignore", message=".*past_key_values.*", category=FutureWarning)


@pytest.fixture(scope="session")
def smollm2():
    """`(model, tokenizer)` of the embedded real model."""
    if not embedded.is_ready():
        pytest.skip("the embedded model is not there: run `make setup`")
    return embedded.load_model()
