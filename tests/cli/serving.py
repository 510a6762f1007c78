"""A real ``relay serve`` on a tiny random model, driven from outside like any other program."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from tests.models.tiny_models import config_json, write_folder

import relay

SOURCE = Path(relay.__file__).parents[1]
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH")]))}
PATIENCE_S = 90.0


def byte_level_alphabet() -> list[str]:
    """GPT-2's 256 printable stand-ins for bytes, in the order of the bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table, extra = {}, 0
    for byte in range(256):
        if byte in printable:
            table[byte] = chr(byte)
        else:
            table[byte] = chr(256 + extra)
            extra += 1
    return [table[byte] for byte in range(256)]


def write_tiny_model(folder: Path, positions: int = 1024) -> Path:
    """A random Llama with a byte tokenizer: ids 0..2 are special, byte b is 3 + b."""
    write_folder(folder, config_json(vocab_size=320, max_position_embeddings=positions))
    names = ["<unk>", "<s>", "</s>"]
    vocab = {name: index for index, name in enumerate(names)} | {
        text: 3 + byte for byte, text in enumerate(byte_level_alphabet())
    }
    vocab |= {f"<unused{index}>": index for index in range(259, 320)}
    special = [
        {
            "id": i,
            "content": n,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for i, n in enumerate(names)
    ]
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "model": {"type": "BPE", "vocab": vocab, "merges": [], "unk_token": None},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


class Serve:
    """One ``relay serve``. ``ready`` waits for the banner; ``stop`` ends it and gives its exit code."""

    def __init__(self, model: Path, cache: Path, *arguments: str) -> None:
        command = [sys.executable, "-m", "relay.cli.main", "serve", str(model), "--port", "0", "--offline"]
        command += ["--backend", "reference", "--cache-dir", str(cache), "--kv-cache-memory", "8M", *arguments]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT,
            start_new_session=True,
        )
        self.url = ""

    def ready(self) -> "Serve":
        assert self.process.stdout is not None
        banner = []
        while not self.url:
            line = self.process.stdout.readline()
            if not line:
                raise AssertionError(f"no banner; stderr: {self.process.communicate()[1]}")
            banner.append(line)
            found = re.search(r"at (http://\S+)", line)
            self.url = found[1] if found else ""
        return self

    def call(self, path: str, body: dict | None = None) -> tuple[int, dict]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def complete(self, prompt: list[int], max_tokens: int, **values) -> list[int]:
        body = {
            "prompt": prompt,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "return_token_ids": True,
            "seed": 5,
        } | values
        status, answer = self.call("/v1/completions", body)
        assert status == 200, answer
        return answer["choices"][0]["token_ids"]

    def worker(self, name: str) -> dict:
        return next(worker for worker in self.call("/status")[1]["workers"] if worker["id"] == name)

    def metrics(self) -> dict[str, float]:
        """Samples without a worker's labels, by name."""
        with urllib.request.urlopen(self.url + "/metrics", timeout=PATIENCE_S) as response:
            lines = [line.rpartition(" ") for line in response.read().decode().splitlines() if not line.startswith("#")]
        return {name.partition("{")[0]: float(value) for name, _, value in lines if 'worker="' not in name}

    def wait_for(self, condition) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, self.call("/status")
            time.sleep(0.05)

    def pids(self) -> list[int]:
        """The server's process and all of its workers'."""
        workers = self.call("/status")[1]["workers"]
        return [self.process.pid, *(worker[key] for worker in workers for key in ("pid", "agent_pid"))]

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate(timeout=PATIENCE_S)


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 15
    while any(running(pid) for pid in pids):
        assert time.monotonic() < deadline, [pid for pid in pids if running(pid)]
        time.sleep(0.02)
