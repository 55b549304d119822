"""Builds the native CPU kernels against the installed torch; everything else is in pyproject.toml.

The extension is optional: without torch at build time, without a compiler, or after a failed compile the
package installs all the same and runs on the torch reference. KVSTRATA_SANITIZE=1 compiles the kernels with
AddressSanitizer and UndefinedBehaviorSanitizer; KVSTRATA_NO_NATIVE=1 skips them.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from setuptools import setup

ROOT = Path(__file__).parent
COMMON_FLAGS = ["-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden", "-Wall", "-Wno-psabi"]
SANITIZE_FLAGS = [
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=undefined",
    "-fno-omit-frame-pointer",
]


def native_extension() -> dict[str, Any]:
    """The arguments of `setup` that build `kvstrata._native`, or none where it cannot be built."""
    if os.environ.get("KVSTRATA_NO_NATIVE") == "1":
        return {}
    try:
        from torch.utils.cpp_extension import BuildExtension, CppExtension  # noqa: PLC0415 (may be absent)
    except ImportError:
        sys.stderr.write("kvstrata: torch is not installed, building without native kernels\n")
        return {}

    class OptionalBuild(BuildExtension):
        """A failed compile is reported and leaves the package without the extension."""

        def run(self) -> None:
            try:
                super().run()
            except (Exception, SystemExit) as error:
                if os.environ.get("KVSTRATA_REQUIRE_NATIVE") == "1":
                    raise
                sys.stderr.write(f"kvstrata: native kernels were not built: {error}\n")
                self.extensions = []

        def get_outputs(self) -> list[str]:
            return [path for path in super().get_outputs() if Path(path).exists()]

    sanitize = os.environ.get("KVSTRATA_SANITIZE") == "1"
    # OpenMP's runtime is the one torch has loaded, so it is named when compiling and not when linking.
    compile_flags = [
        *COMMON_FLAGS,
        "-fopenmp",
        *(["-O1", "-g", *SANITIZE_FLAGS] if sanitize else ["-O3", "-g0"]),
    ]
    extension = CppExtension(
        "kvstrata._native",
        sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.cpp")),
        include_dirs=[str(ROOT / "csrc")],
        depends=sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.h")),
        extra_compile_args=compile_flags,
        extra_link_args=SANITIZE_FLAGS[:1] if sanitize else [],
    )
    return {"ext_modules": [extension], "cmdclass": {"build_ext": OptionalBuild}}


setup(**native_extension())
