"""Over a thousand lines in over twenty scripts: phrases as they are, mixed, numbered, cut and spaced oddly."""

import random
from pathlib import Path


def phrases() -> dict[str, list[str]]:
    """Script → phrases. In the file, \\n, \\r and \\t stand for control characters."""
    found = {}
    for line in (Path(__file__).parent / "phrases.txt").read_text(encoding="utf-8").split("\n"):
        if line:
            script, *texts = line.split("\t")
            found[script] = [text.replace("\\n", "\n").replace("\\r", "\r").replace("\\t", "\t") for text in texts]
    return found


def corpus_lines(count: int = 1200) -> list[str]:
    """The same lines every time."""
    by_script = phrases()
    everything = [text for texts in by_script.values() for text in texts]
    rng = random.Random(20240521)
    lines = ["", " ", "\n", *everything]
    glue = ["", " ", "  ", "\n", "\t", ", ", "…", "'s ", "\u3000", "\u0301", " 3.14 ", "12345", "()", "\u200d"]
    while len(lines) < count:
        parts = [rng.choice(everything) for _ in range(rng.randint(1, 4))]
        parts = [part[rng.randint(0, len(part) // 2) : rng.randint(len(part) // 2, len(part))] for part in parts]
        line = parts[0]
        for part in parts[1:]:
            line += rng.choice(glue) + part
        if rng.random() < 0.15:
            line = line.upper() if rng.random() < 0.5 else line.swapcase()
        if rng.random() < 0.1:
            line += str(rng.randint(0, 10**9))
        if rng.random() < 0.1:
            line += "".join(
                chr(rng.choice([rng.randint(0x20, 0x2FFF), rng.randint(0x1F300, 0x1FAFF)])) for _ in range(6)
            )
        lines.append(line)
    return lines
