import json
from pathlib import Path

import pytest

from eval.paths import data_root
from eval.stand_in import byte_tokenizer
from eval.stand_in import tiny_model as make_tiny_model


@pytest.fixture(scope="session")
def data() -> Path:
    root = data_root()
    if not root.is_dir():
        pytest.skip(f"benchmark files are not at {root}; set FLEXICACHE_DATA to their folder")
    return root


@pytest.fixture
def write_jsonl(tmp_path):
    def write(rows, name="rows.jsonl"):
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    return write


@pytest.fixture
def tokenizer():
    return byte_tokenizer()


@pytest.fixture
def tiny_model():
    return make_tiny_model()
