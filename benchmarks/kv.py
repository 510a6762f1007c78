"""``relay bench kv`` of one KV dtype, with the provenance of its figures, and its pictures for the docs.

Run: ``python -m benchmarks.kv float32`` (or ``bfloat16``); writes ``benchmarks/results/cpu/kv_float32.json``. The pictures,
of fp32, go to ``docs/images``. What follows the dtype is passed on to ``relay bench kv``.
"""

import argparse
import json
import subprocess
import sys

from benchmarks import report
from benchmarks.tables import ROOT


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dtype", choices=("float32", "bfloat16"))
    options, others = parser.parse_known_args()
    command = [sys.executable, "-m", "relay.cli.main", "bench", "kv", "--json", "--kv-cache-dtype", options.dtype]
    # What a full D does to others depends on no dtype: once is enough.
    command += ["--chart", str(ROOT / "docs" / "images")] if options.dtype == "float32" else ["--probes", "0"]
    done = subprocess.run([*command, *others], stdout=subprocess.PIPE, check=True)
    path = ROOT / "benchmarks" / "results" / "cpu" / f"kv_{options.dtype}.json"
    report.write(str(path), json.loads(done.stdout))


if __name__ == "__main__":
    main()
