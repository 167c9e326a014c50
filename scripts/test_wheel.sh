#!/usr/bin/env bash
# Builds the wheel and uses it as a stranger would: in a new environment that holds nothing but torch
# and what the wheel's own metadata asks for, outside the repository, with no GPU and no triton.
#
#   scripts/test_wheel.sh
#   TORCH=torch==2.6.0 PYTHON=python3.12 scripts/test_wheel.sh
#
# Needs python >= 3.11 and the package registry. TORCH should name a build for CPUs.
set -euo pipefail
cd "$(dirname "$0")/.."

torch=${TORCH:-$(grep '^torch==' constraints.txt)}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# A copy of the tracked files: an old build folder in the tree must not reach the wheel.
mkdir "$scratch/source" "$scratch/elsewhere"
git ls-files -z | tar --create --null --files-from=- | tar --extract --directory "$scratch/source"

"${PYTHON:-python3}" -m venv "$scratch/venv"
bin=$scratch/venv/bin
"$bin/pip" wheel -q --no-deps --wheel-dir "$scratch/dist" "$scratch/source"
wheel=$(echo "$scratch"/dist/flexicache_hf-*.whl)
# One command, so that the wheel's own requirements cannot replace this torch by another.
"$bin/pip" install -q "$torch" "$wheel"
"$bin/pip" check

cd "$scratch/elsewhere"
unset PYTHONPATH
export CUDA_VISIBLE_DEVICES= HF_HUB_OFFLINE=1 FLEXICACHE_HOME="$scratch/home"
"$bin/flexicache" --help >help.txt
for command in generate profile; do
    grep -q "^ *$command " help.txt || { echo "flexicache --help does not list $command"; exit 1; }
done
"$bin/flexicache" generate --help >/dev/null
"$bin/flexicache" profile --help >/dev/null
"$bin/python" -I - "$scratch/venv" <<'PYTHON'
import sys

sys.modules["triton"] = None  # importing it raises ImportError, whatever torch brought along

import warnings
from pathlib import Path

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

import flexicache_hf
from flexicache_hf import FlexiCacheDynamicCache, HeadProfile
from flexicache_hf.models.embedded import MODEL_ID

home = Path(flexicache_hf.__file__).resolve()
assert home.is_relative_to(Path(sys.argv[1]).resolve()), f"imported {home}, not the wheel"
assert (home.parent / "py.typed").is_file(), "py.typed is not in the wheel"
assert not torch.cuda.is_available()

# the bundled profile: found by the model's name, through the same search a cache makes
shape = dict(vocab_size=97, hidden_size=576, intermediate_size=96, num_hidden_layers=30)
config = LlamaConfig(**shape, num_attention_heads=9, num_key_value_heads=3)
config._name_or_path = MODEL_ID
torch.manual_seed(0)
model = LlamaForCausalLM(config).eval()
model.generation_config.eos_token_id = None
profile = HeadProfile.for_model(model, hub=False)
assert profile is not None and len(profile.unstable_heads) > 0, "no profile in the wheel"

warnings.simplefilter("error", flexicache_hf.FlexiCacheWarning)  # as if there were no profile
prompt = torch.randint(1, 97, (1, 400))
answers = []
for budget in (4096, 128):  # dense, and pages that come and go
    cache = FlexiCacheDynamicCache(model, token_budget=budget)
    answers.append(model.generate(prompt, max_new_tokens=40, do_sample=False, past_key_values=cache))
    assert answers[-1].shape == (1, 440), answers[-1].shape
dense = model.generate(prompt, max_new_tokens=40, do_sample=False)
assert torch.equal(answers[0], dense), "a budget that covers everything must not change the answer"
assert cache.stats().total.promoted > 0 and cache.memory_usage().host > 0
print(
    f"flexicache_hf from {home.parent.name}, torch {torch.__version__}, transformers "
    f"{transformers.__version__}: {len(profile.unstable_heads)} unstable heads bundled, "
    f"{cache.stats().total.promoted} pages promoted"
)
PYTHON
echo "wheel passed: $(basename "$wheel")"
