"""Builds the C kernels: one shared library per instruction set, next to the sources.

``python -m relay.kernels.cpu.build`` for a source tree; the wheel build (hatch_build.py) calls ``build``. Standard library only,
because it runs before the package's dependencies exist.
"""

import hashlib
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
_FLAGS = (
    "-std=gnu11",
    "-O3",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fPIC",
    "-fvisibility=default",
    "-Wall",
    "-Wextra",
)
_AVX2 = ("-mavx2", "-mfma", "-mf16c", "-msse4.2")
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512")
_VARIANTS: dict[str, dict[str, list[str]]] = {
    "x86_64": {
        "avx512": ["-DRELAY_AVX512", *_AVX2, *_AVX512],
        "avx2": ["-DRELAY_AVX2", *_AVX2],
        "portable": ["-mfma"],
        "nofma": ["-DRELAY_NOFMA"],
    },
    "aarch64": {"portable": []},
}


class BuildError(Exception):
    """The compiler is missing or refused; the text holds its words."""


def variants(machine: str = platform.machine()) -> dict[str, list[str]]:
    """Instruction sets built on ``machine`` and their compiler flags."""
    try:
        return _VARIANTS[{"amd64": "x86_64", "arm64": "aarch64"}.get(machine.lower(), machine.lower())]
    except KeyError:
        raise BuildError(f"no kernels for {machine}: Relay runs on x86_64 and aarch64") from None


def library_path(isa: str) -> Path:
    """Where the library of ``isa`` lies."""
    return FOLDER / f"relay_{isa}.so"


def source_digest() -> str:
    """Hex digest of every source and flag; each library carries the one it was built from."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted([*FOLDER.glob("*.c"), *FOLDER.glob("*.h")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    digest.update(repr((_FLAGS, _VARIANTS)).encode())
    return digest.hexdigest()


def build(compiler: str | None = None, only: list[str] | None = None) -> list[Path]:
    """Compile every variant of this machine (or those in ``only``); each library is replaced whole.

    ``compiler`` defaults to $CC, then cc. Raises BuildError.
    """
    command = shlex.split(compiler or os.environ.get("CC", "cc"))
    digest = source_digest()
    chosen = {isa: flags for isa, flags in variants().items() if only is None or isa in only}
    sources = sorted(FOLDER.glob("*.c"))
    with (
        tempfile.TemporaryDirectory(dir=FOLDER, prefix=".build-") as folder,
        ThreadPoolExecutor(os.cpu_count()) as pool,
    ):
        jobs = []
        for isa, flags in chosen.items():
            for source in sources:
                target = Path(folder, f"{isa}-{source.stem}.o")
                arguments = [*_FLAGS, *flags, f'-DRELAY_SOURCE_DIGEST="{digest}"', "-c", str(source), "-o", str(target)]
                jobs.append((isa, target, pool.submit(_run, [*command, *arguments])))
        for _, _, job in jobs:
            job.result()
        for isa in chosen:
            linked = Path(folder, library_path(isa).name)
            objects = [str(target) for owner, target, _ in jobs if owner == isa]
            _run([*command, "-shared", *objects, "-o", str(linked), "-lpthread", "-lm"])
            linked.replace(library_path(isa))
    return [library_path(isa) for isa in chosen]


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise BuildError(f"no C compiler: {command[0]} is not installed (set CC to name another)") from None
    if done.returncode:
        raise BuildError(f"{shlex.join(command)}\n{done.stderr}")


if __name__ == "__main__":
    try:
        for path in build(only=sys.argv[1:] or None):
            print(path)
    except BuildError as error:
        raise SystemExit(f"kernels not built: {error}") from None
