"""Parts of a measurement under one limit of time, in one file that is rewritten after each; parts of an earlier file kept."""

import json
import math
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.standing import Void

# What a part's figures mean. A change of meaning takes the next number, and older parts are no longer merged.
SERVED = ("split", "split-other", "colocated", "ranks", "kill", "kill-replica")
FORMS = {**dict.fromkeys(SERVED, 3), "kv": 1, "kv-other": 1}  # 3: that the workers stood through it is looked at
SKIPPED = "skipped: "
UNMERGED = ("topology", "prepare")
NO_VLLM = "not run: vLLM is not on this machine and nothing can be fetched there; --vllm PORT MODEL drives one that is"


def form_of(part: str) -> int:
    """The form of ``part``; ``colocated-512`` has that of ``colocated``."""
    name, _, number = part.rpartition("-")
    return FORMS.get(name if number.isdigit() else part, 1)


class Run:
    """Parts under one limit of time, with what they found in one file.

    ``earlier`` is the document of another run on the same ``backend``: its parts stay until this run measures them, each with the
    commit, date and command that made it (``made``). Raises ValueError where the backends differ.
    """

    def __init__(self, out: Path, limit_s: float, backend: str, earlier: dict[str, Any] | None = None) -> None:
        self._out = out
        self._end = time.monotonic() + limit_s
        self._context = report.provenance()
        self.found: dict[str, Any] = {"backend": backend, "parts": {}, "made": {}, "problems": {}, "void": {}}
        self.found["vllm"] = {"note": NO_VLLM}
        if earlier is not None:
            self._keep(earlier)

    def _keep(self, earlier: dict[str, Any]) -> None:
        backend = earlier.get("backend", "cuda")  # which the first files did not say
        if backend != self.found["backend"]:
            raise ValueError(f"the earlier parts are of {backend}, not of {self.found['backend']}")
        for name, value in earlier["parts"].items():
            made = earlier.get("made", {}).get(name) or {
                **{key: earlier[key] for key in ("commit", "date", "command")},
                "seconds": earlier.get("part_seconds", {}).get(name),
                "form": 1,
            }
            if name not in UNMERGED and value is not None and made["form"] == form_of(name):
                self.found["parts"][name], self.found["made"][name] = value, made
        if "note" not in earlier.get("vllm", {"note": ""}):
            self.found["vllm"] = earlier["vllm"]

    def left_s(self) -> float:
        return self._end - time.monotonic()

    def part(self, name: str, needs_s: float, measure: Callable[[], Any]) -> Any:
        """What ``measure`` returns; None, recorded, where it failed or there was no time for it.

        Figures that ``measure`` itself calls void are kept apart from the parts, beside the problem.
        """
        if self.left_s() < needs_s:
            self.problem(name, f"{SKIPPED}{self.left_s():.0f} s were left, it may take {needs_s:.0f}")
            return None
        began = time.monotonic()
        try:
            value = measure()
        except Void as void:
            self.found["void"][name] = void.figures
            self.problem(name, str(void))
            return None
        except Exception as error:  # recorded, and the next part runs
            self.problem(name, "".join(traceback.format_exception_only(error)).strip()[-3000:])
            return None
        self.found["parts"][name] = value
        made = {key: self._context[key] for key in ("commit", "date", "command")}
        self.found["made"][name] = {**made, "seconds": round(time.monotonic() - began, 1), "form": form_of(name)}
        self.save()
        return value

    def failed(self, name: str) -> bool:
        """Whether ``name`` was tried and has no figures."""
        return not self.found["problems"].get(name, SKIPPED).startswith(SKIPPED)

    def log(self, name: str) -> Path:
        """Where the log of what serves ``name`` is to be."""
        return self._out.with_name(f"{name}.log")

    def problem(self, name: str, text: str) -> None:
        """Record why ``name`` has no figures of this run."""
        self.found["problems"][name] = text
        print(name, "" if text.startswith(SKIPPED) else "FAILED", text, flush=True)
        self.save()

    def save(self) -> None:
        document = without_nan({**self._context, **self.found})
        self._out.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")


def without_nan(value: Any) -> Any:
    """``value`` with None for percentiles of nothing, which JSON has no number for."""
    if isinstance(value, dict):
        return {name: without_nan(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
