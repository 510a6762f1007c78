"""``relay status``: what a running server says about its workers."""

import http.client
import json
import urllib.error
import urllib.request
from typing import Any

import click

from relay.errors import RelayError, UsageError

TIMEOUT_S = 5.0


@click.command()
@click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="The server's address.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def status(url: str, as_json: bool) -> None:
    """Show the workers of a running server."""
    answer = fetch_status(url)
    if as_json:
        click.echo(json.dumps(answer))
        return
    columns = ("id", "role", "state", "incarnation", "pid", "agent_pid", "kv_used", "kv_total", "transports", "devices")
    rows = [columns, *([_cell(worker[column]) for column in columns] for worker in answer["workers"])]
    widths = [max(len(str(row[index])) for row in rows) for index in range(len(columns))]
    for row in rows:
        click.echo("  ".join(str(cell).ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _cell(value: Any) -> str:
    """Transports with the number of transfers each has carried, as "shm 12 tcp 0"; devices with plus signs; others as they are."""
    if isinstance(value, list):
        return "+".join(map(str, value)) or "cpu"
    return " ".join(f"{name} {count}" for name, count in value.items()) if isinstance(value, dict) else str(value)


def fetch_status(url: str) -> dict[str, Any]:
    """GET ``url``/status. Raises UsageError for what is no address, RelayError if nobody answers there; one line each."""
    target = url.rstrip("/") + "/status"
    if not target.startswith(("http://", "https://")):
        raise UsageError(f"--url {url!r} does not begin with http:// or https://")
    try:
        with urllib.request.urlopen(target, timeout=TIMEOUT_S) as response:
            answer = json.load(response)
    except (OSError, urllib.error.URLError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        if isinstance(reason, ConnectionRefusedError):
            raise RelayError(f"no server at {url}; start one with: relay serve, or name another with --url") from error
        raise RelayError(f"no answer from {target}: {getattr(reason, 'strerror', None) or reason}") from error
    if not isinstance(answer, dict) or not isinstance(answer.get("workers"), list):
        raise RelayError(f"{target} is not a Relay server's")
    return answer
