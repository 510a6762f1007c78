"""Chooses and loads the shared library of C kernels for this processor."""

import ctypes
import platform
from ctypes import c_char_p, c_float, c_int, c_int64, c_size_t, c_uint32, c_void_p
from functools import cache
from pathlib import Path

from relay.errors import StartupError, UsageError
from relay.kernels.cpu import build, records

_NEEDS = {  # best first
    "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx2", "fma", "f16c", "sse4_2"},
    "avx2": {"avx2", "fma", "f16c", "sse4_2"},
    "portable": {"fma"},
    "nofma": set(),
}


def available(machine: str | None = None, cpuinfo: str | None = None) -> list[str]:
    """Instruction sets this processor can run, best first; by default of the machine we run on."""
    built = build.variants(machine or platform.machine())
    if "avx2" not in built:
        return list(built)
    text = Path("/proc/cpuinfo").read_text() if cpuinfo is None else cpuinfo
    line = next((line for line in text.splitlines() if line.startswith("flags")), "")
    flags = set(line.partition(":")[2].split())
    return [isa for isa, needs in _NEEDS.items() if isa in built and needs <= flags]


def choose(isa: str | None) -> str:
    """``isa`` if this processor has it, the best one for None. Raises UsageError."""
    names = available()
    if isa is None:
        return names[0]
    if isa not in names:
        raise UsageError(f"this processor has no {isa} kernels; it has {', '.join(names)}")
    return isa


@cache
def load(isa: str) -> ctypes.CDLL:
    """The library of ``isa`` with its functions typed. Raises StartupError if it is missing or older than its sources."""
    path = build.library_path(isa)
    advice = "run `python -m relay.kernels.cpu.build`"
    if not path.exists():
        raise StartupError(f"the C kernels are not built ({path} is missing): {advice}")
    library = ctypes.CDLL(str(path))
    library.relay_source_digest.restype = c_char_p
    if library.relay_source_digest().decode() != build.source_digest():
        raise StartupError(f"the C kernels are older than their sources ({path}): {advice}")
    _declare(library, "relay_run", c_int, c_void_p, c_void_p, c_int, c_int, c_void_p)
    _declare(library, "relay_scratch_floats", c_int64, c_int64, c_int)
    _declare(library, "relay_release", None, c_void_p)
    _declare(library, "relay_exp2", None, c_void_p, c_void_p, c_int64)
    _declare(library, "relay_sizeof", c_size_t, c_int)
    _declare(library, "relay_crc32c", c_uint32, c_uint32, c_void_p, c_size_t)
    _declare(
        library, "relay_read_kv", c_int, c_void_p, c_int, c_int, c_int, c_void_p, c_int64, c_int64, c_void_p, c_void_p
    )
    _declare(
        library, "relay_write_kv", c_int, c_void_p, c_int, c_int, c_int, c_void_p, c_int64, c_int64, c_void_p, c_void_p
    )
    _declare(library, "relay_copy_block", None, c_void_p, c_int64, c_int64)
    _declare(library, "pool_create", c_void_p, c_int)
    _declare(library, "pool_destroy", None, c_void_p)
    _declare(library, "relay_measure_fma", None, c_void_p, c_int64)
    _declare(library, "relay_measure_read", None, c_void_p, c_void_p, c_int64)
    for index, record in enumerate((records.Op, records.Model, records.Batch)):
        if library.relay_sizeof(index) != ctypes.sizeof(record):
            raise StartupError(f"{record.__name__} in records.py is not the struct of {path}")
    return library


def instruction_class(isa: str) -> str:
    """What of ``isa`` the output depends on: whether a multiply-add rounds once."""
    return "nofma" if isa == "nofma" else "fma"


def exp2(isa: str, values: "ctypes.Array[c_float]") -> "ctypes.Array[c_float]":
    """The kernels' exp2 of fp32 values; a test compares it with kernels/canon.py."""
    out = (c_float * len(values))()
    load(isa).relay_exp2(ctypes.addressof(values), ctypes.addressof(out), len(values))
    return out


def _declare(library: ctypes.CDLL, name: str, result: type | None, *arguments: type) -> None:
    function = getattr(library, name)
    function.restype = result
    function.argtypes = list(arguments)
