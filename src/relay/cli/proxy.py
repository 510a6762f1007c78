"""``relay proxy``: a local proxy that keeps streams whole for clients that do not resume by themselves."""

import contextlib
import os
import sys

import click

from relay.config import LOG_LEVELS
from relay.errors import UsageError


@click.command()
@click.option(
    "--upstream", "upstreams", multiple=True, required=True, help="http://HOST:PORT of a gateway; repeatable."
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=int, default=8001, show_default=True, help="Port to listen on; 0 takes a free one.")
@click.option(
    "--patience", type=float, default=30.0, show_default=True, help="Seconds a request is tried without progress."
)
@click.option(
    "--log-level", type=click.Choice(LOG_LEVELS), default="info", show_default=True, help="Of what stderr shows."
)
def proxy(upstreams: tuple[str, ...], host: str, port: int, patience: float, log_level: str) -> int:
    """Pass requests to gateways; a stream that breaks goes on at the next one, and the client does not notice."""
    if patience <= 0:
        raise UsageError("--patience must be a positive number of seconds")
    import uvicorn

    from relay.api.app import UVICORN_OPTIONS
    from relay.cli.console import Console
    from relay.cli.listener import open_listener
    from relay.cli.server import CONSOLE_WAIT_S, log_to
    from relay.proxy.app import Proxy
    from relay.proxy.upstream import Upstream

    app = Proxy([Upstream.parse(url) for url in upstreams], patience)
    console = Console(sys.stderr.fileno())
    log_to(console, log_level)
    try:
        with contextlib.closing(open_listener(host, port)) as listener:
            bound = listener.getsockname()
            os.write(sys.stdout.fileno(), f"Relay proxies at http://{bound[0]}:{bound[1]}\n".encode())
            options = {**UVICORN_OPTIONS, "lifespan": "off", "timeout_graceful_shutdown": 5}
            uvicorn.Server(uvicorn.Config(app, **options)).run(sockets=[listener])  # type: ignore[arg-type]
    finally:
        console.finish(CONSOLE_WAIT_S)
    return 0
