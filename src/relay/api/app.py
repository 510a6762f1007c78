"""The ASGI application: routes, error handlers, and the life of the tokenizer pool."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from relay.api.admin import AdminEndpoint
from relay.api.chat import ChatEndpoint
from relay.api.completions import CompletionsEndpoint
from relay.api.context import ChatTemplate, Context, Tokenizer
from relay.api.errors import ApiError, error_response
from relay.api.health import HealthEndpoint
from relay.api.metrics import MetricsPage
from relay.api.models import ModelsEndpoint
from relay.api.validation import ApiLimits
from relay.control.contract import Gateway

# The options of uvicorn.Config this application is made for; the access log is its own ("relay.api.access").
UVICORN_OPTIONS: dict[str, object] = {
    "http": "httptools",
    "loop": "uvloop",
    "ws": "none",
    "access_log": False,
    "server_header": False,
    "log_config": None,
    "timeout_keep_alive": 75,
}


def create_app(
    gateway: Gateway,
    tokenizer: Tokenizer,
    chat_template: ChatTemplate | None = None,
    *,
    served_names: Sequence[str] | None = None,
    limits: ApiLimits | None = None,
    seed: int | None = None,
) -> Starlette:
    """The HTTP surface of ``gateway``. ``served_names`` default to the model's own name; the first is used for metrics.

    ``seed``: where the seeds of requests without one are drawn from, at random if None.
    """
    context = Context(
        gateway, tokenizer, chat_template, served_names or (gateway.model.name,), limits or ApiLimits(), seed
    )
    admin = AdminEndpoint(context)
    models, health = ModelsEndpoint(context), HealthEndpoint(context)
    page = MetricsPage(context.metrics, gateway.metrics)

    async def metrics(request: Request) -> Response:
        return Response(page.render(), headers={"content-type": page.content_type})

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            context.pool.close()

    return Starlette(
        routes=[
            Route("/v1/chat/completions", ChatEndpoint(context), methods=["POST"]),
            Route("/v1/completions", CompletionsEndpoint(context), methods=["POST"]),
            Route("/v1/models", models.list),
            Route("/v1/models/{model:path}", models.one),
            Route("/live", health.live),
            Route("/ready", health.ready),
            Route("/health", health.health),
            Route("/status", health.status),
            Route("/version", health.version),
            Route("/metrics", metrics),
            Route("/admin/drain", admin.drain, methods=["POST"]),
            Route("/admin/restart", admin.restart, methods=["POST"]),
        ],
        exception_handlers={ApiError: _api_error, HTTPException: _http_error, Exception: _unexpected},
        lifespan=lifespan,
    )


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = {404: f"There is nothing at {request.url.path}.", 405: f"{request.method} is not allowed here."}
    detail = ApiError(text.get(error.status_code, str(error.detail)), status=error.status_code)
    return error_response(detail, dict(error.headers or {}))


async def _unexpected(request: Request, error: Exception) -> Response:
    """The traceback is logged by the server; the client learns only that it is not its fault."""
    return error_response(ApiError("Internal server error.", status=500, code="internal_error"))
