"""``relay drain`` and ``relay restart``: workers leave without a dropped request."""

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import click

from relay.cli.status import TIMEOUT_S, fetch_status
from relay.errors import RelayError, UsageError

POLL_S = 0.2

_url = click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="The server's address.")
_wait = click.option("--wait/--no-wait", default=True, show_default=True, help="Return when it is done, or at once.")


def _seconds(context: click.Context, parameter: click.Parameter, value: float) -> float:
    """Checked before anything is ordered."""
    if not value > 0:  # NaN too
        raise UsageError(f"--timeout must be a positive number of seconds, not {value:g}")
    return value


_timeout = click.option(
    "--timeout", default=600.0, show_default=True, callback=_seconds, help="Seconds to wait; the order stands anyway."
)


@click.command()
@click.argument("workers", nargs=-1, required=True)
@_url
@_wait
@_timeout
def drain(workers: tuple[str, ...], url: str, wait: bool, timeout: float) -> None:
    """Take WORKERS out: their requests move to others, then they end and stay out until `relay restart WORKER`."""
    order(url, "drain", {"workers": list(workers)})
    if wait:
        _follow(
            url, timeout, lambda status: _states(status, workers), lambda states: set(states.values()) == {"stopped"}
        )


@click.command()
@click.argument("workers", nargs=-1)
@click.option(
    "--rolling", is_flag=True, help="One after another, each when all others are ready. Without WORKERS: all."
)
@_url
@_wait
@_timeout
def restart(workers: tuple[str, ...], rolling: bool, url: str, wait: bool, timeout: float) -> None:
    """Drain WORKERS and start them again."""
    if not workers and not rolling:
        raise UsageError("name the workers to restart, or use --rolling for all of them, one after another")
    workers_before = fetch_status(url)["workers"]
    before = {worker["id"]: worker["incarnation"] for worker in workers_before}
    order(url, "restart", {"workers": list(workers), "rolling": rolling})
    if wait and rolling:
        names = workers or [worker["id"] for worker in workers_before if worker["state"] != "stopped"]
        rollout = Rollout({name: before[name] for name in names})
        end = _follow(url, timeout, rollout.look, lambda _: rollout.over)
        if end["left"]:
            why = end["problem"] or "the gateway that led it is gone"
            raise RelayError(f"the rolling restart ended early: {why}; not restarted: {', '.join(end['left'])}")
    elif wait:
        new = dict.fromkeys(workers, "ready")

        def states(status: dict[str, Any]) -> dict[str, str]:
            grown = {worker["id"] for worker in status["workers"] if worker["incarnation"] > before[worker["id"]]}
            return {
                name: state if name in grown or state != "ready" else "to drain"
                for name, state in _states(status, workers).items()
            }

        _follow(url, timeout, states, lambda found: found == new)


class Rollout:
    """A rolling restart as the clients of any gateway see it: only the one that leads it says which workers are left, so it is
    over when every worker has a new life, or when every gateway was heard to lead none. ``before``: incarnations by name."""

    def __init__(self, before: dict[str, int]) -> None:
        self._before = before
        self._led: dict[tuple[str, int], dict[str, Any]] = {}  # gateway and epoch → what it said last
        self.over = False

    def look(self, status: dict[str, Any]) -> dict[str, Any]:
        """Of one status: who is left, and why it ended early if it did."""
        gateways = {gateway["id"]: (gateway["id"], gateway["epoch"]) for gateway in status["gateways"]}
        if status["gateway"] in gateways:
            self._led[gateways[status["gateway"]]] = status["rollout"]
        new = {w["id"] for w in status["workers"] if w["incarnation"] > self._before.get(w["id"], 0)}
        ready = {w["id"] for w in status["workers"] if w["state"] == "ready"}
        left = [name for name in self._before if name not in new & ready]
        idle = all(key in self._led and not self._led[key]["left"] for key in gateways.values())
        problem = next((led["problem"] for led in self._led.values() if led["problem"]), "") if left else ""
        self.over = not left or idle
        if idle:  # one that is on its way up is not forgotten
            left = [name for name in left if name not in new] if not problem else left
        return {"left": left, "problem": problem}


def order(url: str, what: str, body: dict[str, Any]) -> None:
    """POST to ``url``/admin/``what``. Raises RelayError with the server's reason."""
    target = f"{url.rstrip('/')}/admin/{what}"
    if not target.startswith(("http://", "https://")):
        raise UsageError(f"--url {url!r} does not begin with http:// or https://")
    headers = {"content-type": "application/json", "x-relay-admin": "1"}
    request = urllib.request.Request(target, json.dumps(body).encode(), headers, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S):
            return
    except urllib.error.HTTPError as error:
        raise RelayError(_reason(error)) from error
    except OSError as error:
        raise RelayError(f"no answer from {target}: {getattr(error, 'reason', None) or error}") from error


def _reason(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"{error.url}: {error.code} {error.reason}"


def _states(status: dict[str, Any], workers: tuple[str, ...]) -> dict[str, str]:
    return {worker["id"]: worker["state"] for worker in status["workers"] if worker["id"] in workers}


def _follow(url: str, timeout_s: float, look: Callable[[dict[str, Any]], Any], done: Callable[[Any], bool]) -> Any:
    """Look every moment, saying what changed, until ``done``; returns the last look. Raises RelayError after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    said: Any = None
    while True:
        found = look(fetch_status(url))
        if found != said:
            said = found
            click.echo(json.dumps(found))
        if done(found):
            return found
        if time.monotonic() >= deadline:
            raise RelayError(f"not done after {timeout_s:g} s: {json.dumps(found)}")
        time.sleep(POLL_S)
