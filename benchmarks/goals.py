"""The figures this project set out to reach, and whether the results reach them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Results = dict[str, dict[str, Any]]
SHAPES = ("split", "colocated", "colocated-f32")


@dataclass(frozen=True, slots=True)
class Goal:
    """One goal. ``read`` takes the result named ``source`` to {row or "": measured}; rows are server shapes."""

    text: str
    source: str
    limit: float
    most: bool  # the limit is the most allowed, else the least
    read: Callable[[dict[str, Any]], dict[str, float]]

    def meets(self, measured: float) -> bool:
        return measured <= self.limit if self.most else measured >= self.limit

    @property
    def bound(self) -> str:
        return f"{'≤' if self.most else '≥'} {self.limit:,g}"


def _shapes(figures: dict[str, float]) -> dict[str, float]:
    return {shape: figures[shape] for shape in SHAPES if shape in figures}


def _median(workload: str, figure: str) -> Callable[[dict[str, Any]], dict[str, float]]:
    return lambda serve: {
        shape: serve["medians"][shape][workload][figure] for shape in SHAPES if shape in serve["medians"]
    }


def _ratio(figure: str) -> Callable[[dict[str, Any]], dict[str, float]]:
    return lambda serve: {
        shape: ratios[figure] for shape, ratios in serve.get("ratio_to_transformers", {}).items() if shape in SHAPES
    }


RESUME_SHAPES = {"split": "1P+2D", "colocated": "3"}


def _resume(figure: str, share: str, *kinds: str, less: str = "") -> Callable[[dict[str, Any]], dict[str, float]]:
    """The worst of ``kinds``, by ``less`` the median of another figure."""

    def read(resume: dict[str, Any]) -> dict[str, float]:
        found = {}
        for shape, name in RESUME_SHAPES.items():
            rows = [resume["shapes"][name][kind] for kind in kinds if name in resume["shapes"]]
            if rows:
                found[shape] = max(row[figure][share] - (row[less]["p50"] if less else 0.0) for row in rows)
        return found

    return read


KILLS = ("SIGKILL while it decodes", "SIGKILL in its prompt")
BEYOND = "beyond_reprefill_ms"

GOALS = (
    Goal("`relay serve` with a cached model ready, s", "serve", 3.0, True, lambda r: _shapes(r["ready_s"])),
    Goal("a killed worker ready again, s", "serve", 1.0, True, lambda r: _shapes(r.get("restart_ready_s", {}))),
    Goal("TPOT of one stream (W1), share of transformers serve's", "serve", 0.7, True, _ratio("W1_tpot")),
    Goal("output tok/s of 16 streams (W2), times transformers serve's", "serve", 3.3, False, _ratio("W2_output_tok_s")),
    Goal("prompt tok/s (W1), times transformers serve's", "serve", 1.3, False, _ratio("W1_prompt_tok_s")),
    Goal("TPOT of one stream (W1), ms", "serve", 25.0, True, _median("W1", "tpot_ms")),
    Goal("output tok/s of 16 streams (W2)", "serve", 190.0, False, _median("W2", "output_tok_s")),
    Goal("prompt tok/s (W1: 512 / TTFT)", "serve", 1250.0, False, _median("W1", "prompt_tok_s")),
    Goal("output tok/s, shared prefix (W3)", "serve", 200.0, False, _median("W3", "output_tok_s")),
    Goal("TTFT of a 2,048-token prompt (W4), s", "serve", 1.95, True, _median("W4", "ttft_s")),
    Goal(
        "gateway CPU of a streamed token, all included, µs",
        "gateway",
        40.0,
        True,
        lambda r: {"": r["cpu_us_per_token"]},
    ),
    Goal(
        "tokens/s that one core of gateway carries by that time (256 × 75)",
        "gateway",
        256 * 75.0,
        False,
        lambda r: {"": 1e6 / r["cpu_us_per_token"]},
    ),
    Goal("planning a step of 256 sequences, µs", "scheduler", 300.0, True, lambda r: {"": r["decode"]["plan"]}),
    Goal(
        "greedy tokens equal to transformers fp32, share",
        "correctness",
        1.0,
        False,
        lambda r: {"": r["equal_tokens"] / r["rows"]},
    ),
    Goal(
        "largest logit error, max abs(Δ) / max abs(logit)",
        "correctness",
        1e-4,
        True,
        lambda r: {"": r["max_relative_error"]},
    ),
    Goal("a killed worker noticed, ms, p99", "resume", 5.0, True, _resume("detect_ms", "p99", *KILLS)),
    Goal(
        "next token after a kill less a re-prefill and a step, ms, p50",
        "resume",
        0.0,
        True,
        _resume("resume_ms", "p50", *KILLS, less="reprefill_and_step_ms"),
    ),
    Goal(
        "next token after a SIGSTOP of the engine less a re-prefill, ms, p99",
        "resume",
        1500.0,
        True,
        _resume(BEYOND, "p99", "SIGSTOP of its engine"),
    ),
    Goal(
        "next token after a SIGSTOP of engine and agent less a re-prefill, ms, p99",
        "resume",
        2500.0,
        True,
        _resume(BEYOND, "p99", "SIGSTOP of engine and agent"),
    ),
)
