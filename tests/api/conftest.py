"""One tokenizer for all; one server, a fresh fake gateway and app for each test that asks for one."""

from collections.abc import Iterator

import httpx
import pytest
from api_fakes import FakeGateway, byte_level_tokenizer, chat_template
from api_server import served
from starlette.applications import Starlette
from starlette.types import Receive, Scope, Send

from relay.api.app import create_app
from relay.api.validation import ApiLimits
from relay.models.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return byte_level_tokenizer()


@pytest.fixture
def gateway(tokenizer: Tokenizer) -> FakeGateway:
    return FakeGateway(tokenizer)


@pytest.fixture
def limits() -> ApiLimits:
    return ApiLimits()


class Swap:
    """An ASGI application that can be exchanged between tests, so that one server serves them all."""

    app: Starlette

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)


@pytest.fixture(scope="session")
def server() -> Iterator[tuple[Swap, str]]:
    swap = Swap()
    swap.app = Starlette()
    with served(swap) as url:
        yield swap, url


@pytest.fixture
def base_url(server: tuple[Swap, str], gateway: FakeGateway, tokenizer: Tokenizer, limits: ApiLimits) -> str:
    swap, url = server
    swap.app = create_app(gateway, tokenizer, chat_template(), served_names=("fake", "fake-alias"), limits=limits)
    return url


@pytest.fixture
def client(base_url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=base_url, timeout=20, trust_env=False, verify=False) as client:
        yield client
