"""What stdout says when the cluster is ready: where it is, what it serves, and a request to try."""

import contextlib
import json
import os
import shlex
import socket
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from relay.config import ServeConfig

if TYPE_CHECKING:
    from relay.models.store import LoadedModel


def say_banner(
    config: ServeConfig,
    listener: socket.socket,
    model: "LoadedModel",
    context: int,
    ready: str,
    devices: Sequence[str] = (),
) -> None:
    """``context``: tokens that are served; ``ready``: how long the start took; ``devices``: lines about GPUs."""
    host, port = listener.getsockname()[:2]
    shown = "127.0.0.1" if host == "0.0.0.0" else "[::1]" if host == "::" else f"[{host}]" if ":" in host else host
    url = f"http://{shown}:{port}"
    name = config.served_model_name or model.name
    workers = ", ".join(worker for worker, _ in config.slots)
    gateways = f", {config.gateways} gateways" if config.gateways > 1 else ""
    lines = [f"Relay serves {name} at {url}"]
    asked = config.worker.max_model_len or model.max_model_len
    limited = f", limited by the KV cache from {model.max_model_len}" if context < asked else ""
    lines.append(f"workers  {workers} ({config.worker.backend}){gateways}, context {context} tokens{limited}")
    lines += [f"devices  {line}" for line in devices]
    lines.append(f"ready    {ready}")
    lines.append(f"try      {first_request(url, name)}")
    # Whoever started us may have stopped reading: that is no reason to stop serving.
    with contextlib.suppress(BrokenPipeError):
        os.write(sys.stdout.fileno(), "".join(f"{line}\n" for line in lines).encode())


def first_request(url: str, name: str) -> str:
    """A command to try. With a bound: a small model that does not find its end would fill its whole context, for minutes."""
    body = {
        "model": name,
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 200,
        "stream": True,
    }
    return f"curl -N {url}/v1/chat/completions -H 'content-type: application/json' -d {shlex.quote(json.dumps(body))}"
