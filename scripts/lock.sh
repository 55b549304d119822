#!/usr/bin/env bash
# Write requirements/constraints.txt: what the ranges of pyproject.toml give today, in a new environment.
# Usage: scripts/lock.sh PYTHON    (TORCH_SPEC and TORCH_PIP_ARGS as in the Makefile)
set -euo pipefail

python=$1
cd "$(dirname "$0")/.."
venv=$(mktemp -d)
trap 'rm -rf "$venv"' EXIT

"$python" -m venv "$venv"
pip=("$venv/bin/python" -m pip --disable-pip-version-check)
# shellcheck disable=SC2086  # TORCH_PIP_ARGS is a list of arguments
"${pip[@]}" install --quiet ${TORCH_PIP_ARGS:-} "$TORCH_SPEC"
"${pip[@]}" install --quiet --upgrade setuptools wheel
"${pip[@]}" install --quiet --no-build-isolation ".[server,valkey,plot,test,dev]"
{
    echo "# The versions that kvstrata is tested with; written by \`make lock\`. torch is pinned in the Makefile."
    "${pip[@]}" freeze --all --exclude torch --exclude kvstrata --exclude pip --exclude triton |
        grep -v -i '^nvidia' | LC_ALL=C sort --ignore-case
} >requirements/constraints.txt.new
mv requirements/constraints.txt.new requirements/constraints.txt
