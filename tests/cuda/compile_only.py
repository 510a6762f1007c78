"""Compile a kernel for a GPU that is not here and read what the compiler made of it (the triton wheel holds the tools)."""

import os
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

_TOOLS = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin")
SHARED_LIMIT = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 120: 99 << 10}


@dataclass(frozen=True, slots=True)
class Compiled:
    """Shared memory in bytes, registers a thread, bytes of stack, and how often each instruction stands in the SASS.

    ``operand_widths``: neighbours along k that a thread holds in operands of mma.sync. ``exponentials_before_waits``: for each
    wait for the tensor cores, the exponentials since their last product was issued.
    """

    shared: int
    registers: int
    stack: int
    spills: int
    counts: dict[str, int]
    operand_widths: set[int]
    exponentials_before_waits: list[int]
    ptx: str


def compile_for(
    kernel: Any, types: Mapping[str, str], constants: Mapping[str, Any], capability: int, **options: Any
) -> Compiled:
    """``types`` by argument name ("*bf16", "i32", "fp32", "tensordesc<bf16[32, 64]>"); pointers count as 16-byte aligned."""
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if name not in constants
        and (types[name].startswith("*") or name in ("K", "N", "x_stride", "y_stride", "qkv_stride"))
    }
    source_type = GluonASTSource if kernel.is_gluon() else ASTSource
    source = source_type(
        kernel, signature, constexprs={(names.index(n),): v for n, v in constants.items()}, attrs=aligned
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [os.path.join(_TOOLS, "cuobjdump"), "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
        sass = subprocess.run(
            [os.path.join(_TOOLS, "nvdisasm"), file.name], capture_output=True, text=True, check=True
        ).stdout
    numbers = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    counts: dict[str, int] = {}
    for word in re.findall(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9]+)", sass, re.M):
        counts[word] = counts.get(word, 0) + 1
    waits: list[int] = []
    exponentials = 0
    for word in re.findall(r"\b(HGMMA|MUFU\.EX2|WARPGROUP\.DEPBAR)\b", sass):
        if word == "HGMMA":
            exponentials = 0
        elif word == "MUFU.EX2":
            exponentials += 1
        else:
            waits.append(exponentials)
    return Compiled(
        shared=compiled.metadata.shared,
        registers=numbers.get("REG", 0),
        stack=numbers.get("STACK", 0),
        spills=counts.get("STL", 0) + counts.get("LDL", 0),
        counts=counts,
        operand_widths={int(width) for width in re.findall(r"kWidth = (\d+)", compiled.asm["ttgir"])},
        exponentials_before_waits=waits,
        ptx=compiled.asm["ptx"],
    )
