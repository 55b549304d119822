#!/usr/bin/env bash
# Prove that a bundle works without a network: in a namespace with only loopback, unpack it, install it and run
# the command line's tests from it. Usage: scripts/check_bundle.sh BUNDLE.tar
set -euo pipefail

bundle=$(realpath "$1")
if [ "${KVSTRATA_ALONE:-}" != 1 ]; then
    # A user namespace as well where we are not root.
    user=$([ "$(id -u)" = 0 ] || echo --map-root-user)
    exec env KVSTRATA_ALONE=1 unshare --net $user "$BASH" "$0" "$bundle"
fi

ip link set lo up
if ip route show | grep -q .; then
    echo "error: the namespace has a route out; this would prove nothing" >&2
    exit 1
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export HOME="$work/home" XDG_CACHE_HOME="$work/home/.cache" TMPDIR="$work" # nothing cached earlier may help
mkdir -p "$XDG_CACHE_HOME"
unset PYTHONPATH

tar -xf "$bundle" -C "$work"
cd "$work"/kvstrata-bundle-*
./install.sh --with-tests "$work/venv"
"$work/venv/bin/python" -m pytest tests/cli -p no:cacheprovider
echo "bundle works without a network: $(basename "$bundle")"
