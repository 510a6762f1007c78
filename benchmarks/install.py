"""The base install as a user makes it: a fresh virtual environment, ``pip install .``; seconds and bytes.

Run: ``python -m benchmarks.install [--json FILE]``. Includes building the C kernels; the rest is the network.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import report

ROOT = Path(__file__).parent.parent


def size_bytes(folder: Path) -> int:
    """Bytes of all files under ``folder``."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        bare = size_bytes(Path(folder))
        start = time.perf_counter()
        subprocess.run([f"{folder}/bin/python", "-m", "pip", "install", "--quiet", str(ROOT)], check=True)
        seconds = time.perf_counter() - start
        installed = size_bytes(Path(folder)) - bare
    report.write(options.json, {"base_install_s": round(seconds, 1), "base_install_mb": round(installed / 1e6, 1)})


if __name__ == "__main__":
    main()
