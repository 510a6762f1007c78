"""What one path produced, and how it is compared with the baseline: token ids, logits rows and KV bytes."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class SequenceOutput:
    """Everything a path produced for one choice. Digests are BLAKE2b-16: of fp32 logits rows, one a token; of KV bytes over all
    layers, one a full unit of 16 tokens."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[tuple[float, list[tuple[int, float]]]] = field(default_factory=list)
    logit_digests: list[bytes] = field(default_factory=list)
    kv_digests: list[bytes] = field(default_factory=list)
    finish: str | None = None
    cached_tokens: int = 0
    failure: str = ""  # why it has no end


@dataclass(slots=True)
class PathReport:
    """One row of the table. ``evidence``: what shows that the path was really taken; empty text means it was not."""

    compared: int = 0
    identical: int = 0
    logit_rows: int = 0
    kv_blocks: int = 0
    evidence: str = ""
    differences: list[str] = field(default_factory=list)


def difference(name: str, expected: SequenceOutput, actual: SequenceOutput) -> str | None:
    """One line on the first thing in which ``actual`` differs, or None."""
    if actual.failure:
        return f"{name}: failed: {actual.failure}"
    for position, (a, b) in enumerate(zip(expected.token_ids, actual.token_ids, strict=False)):
        if a != b:
            return f"{name}: token {position} is {b} instead of {a}"
    if len(expected.token_ids) != len(actual.token_ids):
        return f"{name}: {len(actual.token_ids)} tokens instead of {len(expected.token_ids)}"
    if expected.finish != actual.finish:
        return f"{name}: finished by {actual.finish} instead of {expected.finish}"
    if len(actual.logit_digests) != len(actual.token_ids):
        return f"{name}: {len(actual.logit_digests)} logits rows for {len(actual.token_ids)} tokens"
    if not actual.kv_digests and len(expected.kv_digests) > 0:
        return f"{name}: no KV digests"
    for kind in ("logit_digests", "kv_digests", "logprobs"):
        left, right = getattr(expected, kind), getattr(actual, kind)
        if left != right:
            first = next(
                (i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right))
            )
            return f"{name}: {kind} part at {first} of {len(left)}"
    return None


def compare(expected: dict[str, SequenceOutput], actual: dict[str, SequenceOutput], evidence: str) -> PathReport:
    """Compare every sequence of ``expected`` with the path's output of the same name."""
    report = PathReport(evidence=evidence)
    for name, reference in expected.items():
        output = actual.get(name)
        report.compared += 1
        problem = f"{name}: no output" if output is None else difference(name, reference, output)
        if problem is None and output is not None:
            report.identical += 1
            report.logit_rows += len(output.logit_digests)
            report.kv_blocks += len(output.kv_digests)
        elif problem is not None:
            report.differences.append(problem)
    return report
