"""Choosing, building and loading the kernels; the thread pool's manners."""

import time
from pathlib import Path

import pytest

from relay.errors import StartupError
from relay.kernels.cpu import build, library
from relay.kernels.cpu.backend import CpuBackend

AVX512 = "flags\t\t: fpu fma f16c sse4_2 avx2 avx512f avx512bw avx512dq avx512vl"


def test_the_best_instruction_set_the_processor_has_comes_first() -> None:
    assert library.available("x86_64", AVX512) == ["avx512", "avx2", "portable", "nofma"]
    assert library.available("x86_64", "flags\t: fma f16c sse4_2 avx2 avx512f") == ["avx2", "portable", "nofma"]
    assert library.available("x86_64", "flags\t: sse4_2") == ["nofma"]
    assert library.available("aarch64", "") == ["portable"]


def test_an_unknown_machine_or_compiler_is_named() -> None:
    with pytest.raises(build.BuildError, match="riscv64"):
        build.variants("riscv64")
    with pytest.raises(build.BuildError, match="no-such-compiler is not installed"):
        build.build("no-such-compiler", only=["nofma"])


def test_a_missing_library_says_how_to_build_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "library_path", lambda isa: tmp_path / f"{isa}.so")
    with pytest.raises(StartupError, match=r"python -m relay\.kernels\.cpu\.build"):
        library.load.__wrapped__("avx2")


def test_a_library_of_other_sources_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "source_digest", lambda: "another")
    with pytest.raises(StartupError, match="older than their sources"):
        library.load.__wrapped__(library.available()[0])


def test_an_idle_pool_costs_no_processor_time() -> None:
    backend = CpuBackend(4)
    backend.run_fma(8)
    time.sleep(0.02)
    before = time.process_time()
    time.sleep(0.2)
    assert time.process_time() - before < 0.02
    backend.close()


def test_many_pools_start_and_end() -> None:
    for threads in (1, 2, 5, 3):
        backend = CpuBackend(threads)
        for items in (1, 2, 7):
            backend.run_fma(items)
        backend.close()
