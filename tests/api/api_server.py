"""Serves an app through uvicorn on a free port, in a thread with its own loop; as a script, serves the fake model for a look."""

import argparse
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from api_fakes import FakeGateway, byte_level_tokenizer, chat_template
from starlette.types import ASGIApp

from relay.api.app import UVICORN_OPTIONS, create_app


@contextmanager
def served(app: ASGIApp) -> Iterator[str]:
    """Yields the base URL; the server ends with the block."""
    config = uvicorn.Config(app, host="127.0.0.1", port=0, **UVICORN_OPTIONS)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        deadline = time.monotonic() + 20
        while not server.started:
            assert thread.is_alive()
            assert time.monotonic() < deadline
            time.sleep(0.005)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(20)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8000)
    arguments = parser.parse_args()
    tokenizer = byte_level_tokenizer()
    uvicorn.run(
        create_app(FakeGateway(tokenizer), tokenizer, chat_template()),
        host="127.0.0.1",
        port=arguments.port,
        **UVICORN_OPTIONS,
    )
