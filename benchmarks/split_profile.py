"""Why a split server on few cores carries fewer tokens than a colocated one: steps, rows a step and CPU time of each engine in W2.

Run: ``python -m benchmarks.split_profile [--json FILE]``.
"""

import argparse
import asyncio
import json
import time
import urllib.request
from pathlib import Path
from typing import Any

from benchmarks import report, servers
from benchmarks.serve import measure
from benchmarks.workloads import workloads

TICKS_PER_S = 100
REPORT_DELAY_S = 0.5  # workers report their counters with a delay


def cpu_s(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def counters(url: str) -> dict[str, dict[str, float]]:
    """Per worker: CPU seconds of its engine and the counters it reports in /metrics."""
    status = json.load(urllib.request.urlopen(url + "/status"))
    found = {row["id"]: {"cpu_s": cpu_s(row["pid"])} for row in status["workers"]}
    for line in urllib.request.urlopen(url + "/metrics").read().decode().splitlines():
        name, _, rest = line.partition("{")
        if name.startswith("relay_worker_") and name.endswith("_total"):
            worker = rest.split('worker="')[1].split('"')[0]
            found[worker][name.removeprefix("relay_worker_").removesuffix("_total")] = float(line.rsplit(" ", 1)[1])
    return found


def profile(name: str) -> dict[str, Any]:
    """W2 on server ``name``: its figures and what each engine did for them."""
    workload = next(w for w in workloads(servers.tokenizer(), seed=0) if w.name == "W2")
    with servers.start(name) as server:
        time.sleep(REPORT_DELAY_S)
        before = counters(server.url)
        start = time.perf_counter()
        figures = asyncio.run(measure(server, workload))
        wall_s = time.perf_counter() - start
        time.sleep(REPORT_DELAY_S)
        after = counters(server.url)
    engines = {}
    for worker, values in after.items():
        spent = {key: value - before[worker].get(key, 0.0) for key, value in values.items()}
        decoded, steps = spent.get("decode_tokens", 0.0), spent.get("steps", 0.0)
        engines[worker] = {**spent, "decode_rows_a_step": decoded / steps if steps else 0.0}
    return {"figures": figures, "wall_s": wall_s, "engines": engines}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json")
    options = parser.parse_args()
    report.write(options.json, {"W2": {name: profile(name) for name in ("split", "colocated")}})


if __name__ == "__main__":
    main()
