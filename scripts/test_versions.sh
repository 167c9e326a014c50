#!/usr/bin/env bash
# Runs the whole suite on both ends of the supported transformers range, each in its own environment.
#
#   scripts/test_versions.sh                      # the lowest version of pyproject.toml, the newest
#   scripts/test_versions.sh 5.20.0 5.24.0        # these
#   scripts/test_versions.sh 5.17.0 -- tests/test_matrix.py      # these pytest arguments instead
#
# Needs only python >= 3.11 (or PYTHON=...) and the package registry. Environments are kept in
# .venv-versions, so that a second run only tests. Ends with one line for each version, and with an
# error if any of them failed.
set -euo pipefail
cd "$(dirname "$0")/.."

versions=()
while [ $# -gt 0 ] && [ "$1" != "--" ]; do
    versions+=("$1")
    shift
done
if [ $# -gt 0 ]; then shift; fi
tests=("$@")
if [ ${#tests[@]} -eq 0 ]; then tests=(tests -n 2); fi

range=$(sed -n 's/^ *"transformers\([<>=].*\)",.*/\1/p' pyproject.toml)
lowest=$(sed 's/.*>=\([0-9.]*\).*/\1/' <<<"$range")
if [ ${#versions[@]} -eq 0 ]; then versions=("$lowest" newest); fi

mkdir -p .venv-versions
# transformers and what it pins itself may move; all else stays at the known-good versions
grep -vE '^(transformers|tokenizers|huggingface_hub|safetensors)==' constraints.txt \
    >.venv-versions/constraints.txt
torch=$(grep '^torch==' constraints.txt)

declare -A results
failed=0
for version in "${versions[@]}"; do
    wanted="transformers==$version"
    if [ "$version" = newest ]; then wanted="transformers$range"; fi
    venv=".venv-versions/$version"
    [ -d "$venv" ] || "${PYTHON:-python3}" -m venv "$venv"
    results[$version]="FAILED (installation)"
    # all in one command, so that no dependency brings another torch than the pinned one
    if ! "$venv/bin/python" -m pip install -q -U -c .venv-versions/constraints.txt \
        "$torch" "$wanted" -e ".[demo,eval,gpu,dev]"; then
        failed=1
        continue
    fi
    found=$("$venv/bin/python" -c 'import transformers, torch; print(transformers.__version__, "with torch", torch.__version__)')
    echo "== transformers $found"
    # the embedded model, for the tests that need it; without it they are skipped
    "$venv/bin/python" -m flexicache_hf.models.embedded >/dev/null || echo "no embedded model"
    if "$venv/bin/python" -m pytest "${tests[@]}"; then
        results[$version]="passed ($found)"
    else
        results[$version]="FAILED ($found)"
        failed=1
    fi
done

echo
for version in "${versions[@]}"; do
    echo "transformers $version: ${results[$version]}"
done
exit $failed
