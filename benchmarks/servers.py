"""Starts the measured servers as a user would and stops exactly what it started."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tokenizers import Tokenizer

RELAY_SHAPES = {
    "split": ["smollm2", "--prefill", "1", "--decode", "1"],
    "colocated": ["smollm2", "--prefill", "0", "--decode", "1"],
    # The same model widened to fp32 in its pack: equal logits, 5.5 times the bytes to read for a token.
    "colocated-f32": ["smollm2.float32", "--prefill", "0", "--decode", "1"],
}
WEIGHT_FILES = (".pack", ".safetensors")
_MAPPING = re.compile(r"^[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ (\d+) *(.*)$")
RESTART_TIMEOUT_S = 30.0
READY_TIMEOUT_S = 180.0


def end(process: "subprocess.Popen[bytes]", within_s: float) -> None:
    """As Ctrl-C would; killed if it has not ended ``within_s``."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(within_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@dataclass
class Server:
    """A running server. ``ready_s``: process start to the first answered readiness probe."""

    name: str
    url: str
    process: subprocess.Popen[bytes]
    ready_s: float
    model: str

    def body(self, prompt: str, tokens: int) -> dict[str, Any]:
        """A greedy request for exactly ``tokens`` tokens."""
        body: dict[str, Any] = {"model": self.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
        if self.name == "transformers":
            config = {"max_new_tokens": tokens, "do_sample": False, "eos_token_id": -1, "pad_token_id": 2}
            return {**body, "generation_config": json.dumps(config)}
        return {**body, "ignore_eos": True, "stream_options": {"include_usage": True}}

    def pids(self) -> list[int]:
        """The server's process and all its descendants."""
        children: dict[int, list[int]] = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                fields = stat.read_text().rsplit(")", 1)[1].split()
                children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
        found = [self.process.pid]
        for pid in found:
            found += children.get(pid, [])
        return found

    def memory_mb(self) -> dict[str, float]:
        """Proportional set size of the whole tree, in which a page mapped by N processes counts once.

        ``total``; ``weights``: mappings of weight files; ``weights_rss``: the same if every process had a copy of its own;
        ``anonymous``: KV cache, buffers and heaps. Another server on this machine that maps the same file takes its share of
        ``weights``: measure alone.
        """
        total = dict.fromkeys(("total", "weights", "weights_rss", "anonymous"), 0.0)
        for pid in self.pids():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                for name, value in memory_of(Path(f"/proc/{pid}/smaps").read_text()).items():
                    total[name] += value
        return {name: round(value, 1) for name, value in total.items()}

    def status(self) -> dict[str, Any]:
        """Relay's /status."""
        with urllib.request.urlopen(self.url + "/status", timeout=5) as response:
            answer: dict[str, Any] = json.load(response)
        return answer

    def restart_s(self) -> float:
        """SIGKILL the engine of the last worker; seconds until /status shows its next incarnation ready."""
        before = self.status()["workers"][-1]
        began = time.perf_counter()
        os.kill(before["pid"], signal.SIGKILL)
        while time.perf_counter() - began < RESTART_TIMEOUT_S:
            now = next(worker for worker in self.status()["workers"] if worker["id"] == before["id"])
            if now["incarnation"] > before["incarnation"] and now["state"] == "ready":
                return time.perf_counter() - began
            time.sleep(0.005)
        raise RuntimeError(f"{before['id']} was not ready again within {RESTART_TIMEOUT_S:.0f} s")


def memory_of(smaps: str) -> dict[str, float]:
    """Megabytes of one process by kind, from the text of its ``/proc/PID/smaps``."""
    found = dict.fromkeys(("total", "weights", "weights_rss", "anonymous"), 0.0)
    kinds: tuple[str, ...] = ()
    weights = False
    for line in smaps.splitlines():
        mapping = _MAPPING.match(line)
        if mapping:
            weights = mapping[2].removesuffix(" (deleted)").endswith(WEIGHT_FILES)
            kinds = ("total", "weights") if weights else ("total", "anonymous") if mapping[1] == "0" else ("total",)
        elif line.startswith("Pss:"):
            for kind in kinds:
                found[kind] += int(line.split()[1]) * 1024 / 1e6
        elif line.startswith("Rss:") and weights:
            found["weights_rss"] += int(line.split()[1]) * 1024 / 1e6
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def tokenizer() -> Tokenizer:
    """The default model's tokenizer."""
    return Tokenizer.from_str(loaded_model().tokenizer_files.json)


def loaded_model(storage: Literal["native", "float32"] = "native") -> Any:
    """The default model, packed first if need be."""
    from relay.models.store import default_cache_dir, open_model

    return open_model("smollm2", cache_dir=default_cache_dir(os.environ), storage=storage)


def transformers_folder() -> Path:
    """The default model as a Hugging Face folder in fp32, written once from our pack (transformers can not serve it from GGUF in
    fp32)."""
    from benchmarks.export_hf import export

    target = Path(tempfile.gettempdir()) / "relay-bench-smollm2-hf"
    if not (target / "model.safetensors").exists():
        export(loaded_model(), target)
    return target


@contextlib.contextmanager
def start(name: str) -> Iterator[Server]:
    """Start server ``name`` (one of ``RELAY_SHAPES``, or "transformers"), wait until it is ready, stop it at the end."""
    port = free_port()
    environment = dict(os.environ)
    if name == "transformers":
        model = str(transformers_folder())
        command = [str(Path(sys.executable).with_name("transformers")), "serve", model, "--continuous-batching"]
        command += ["--device", "cpu", "--dtype", "float32", "--port", str(port), "--host", "127.0.0.1"]
        environment |= {"OMP_NUM_THREADS": "2", "HF_HUB_OFFLINE": "1"}
        probe = "/health"
    else:
        model = RELAY_SHAPES[name][0]
        loaded_model("float32" if model.endswith(".float32") else "native")
        command = [sys.executable, "-m", "relay.cli.main", "serve", *RELAY_SHAPES[name], "--port", str(port)]
        probe = "/ready"
    log = tempfile.NamedTemporaryFile(prefix=f"bench-{name}-", suffix=".log")  # noqa: SIM115
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
    url = f"http://127.0.0.1:{port}"
    try:
        while True:
            if process.poll() is not None or time.perf_counter() - began > READY_TIMEOUT_S:
                raise RuntimeError(f"{name} did not become ready:\n{Path(log.name).read_text()[-4000:]}")
            with (
                contextlib.suppress(urllib.error.URLError, ConnectionError),
                urllib.request.urlopen(url + probe, timeout=5),
            ):
                break
            time.sleep(0.02)
        yield Server(name, url, process, time.perf_counter() - began, model)
    finally:
        end(process, 30)
        log.close()
