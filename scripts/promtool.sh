#!/usr/bin/env bash
# Gets promtool, which the tests of deploy/prometheus use, from Debian's prometheus package: only this one program,
# unpacked into the folder given, so that nothing is installed and no service starts. Ends with 0 whether or not
# there is one to have: the tests skip without it.
set -uo pipefail

into=${1:?usage: scripts/promtool.sh FOLDER}
if [ -x "$into/promtool" ] || command -v promtool >/dev/null; then
    exit 0
fi
if ! command -v apt-get >/dev/null || ! command -v dpkg-deb >/dev/null; then
    echo "note: no apt here, so no promtool; tests of deploy/prometheus will skip" >&2
    exit 0
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 0
get() { timeout 120 apt-get --quiet download prometheus >/dev/null 2>&1; }
if { get || { timeout 120 apt-get --quiet update >/dev/null 2>&1 && get; }; } &&
    dpkg-deb --extract prometheus_*.deb . && cd - >/dev/null && install -m 0755 "$work/usr/bin/promtool" "$into/"; then
    echo "promtool: $into/promtool" >&2
else
    echo "note: apt does not give the package prometheus; tests of deploy/prometheus will skip" >&2
fi
exit 0
