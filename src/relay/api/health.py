"""Probes and state: /live (the event loop answers), /ready (a request sent now would be served), /health (no work is stuck),
/status (the control plane's view), /version."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

import relay
from relay.api.context import Context


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status_code=status, media_type="application/json")


class HealthEndpoint:
    """Cheap, and never queued behind requests."""

    def __init__(self, context: Context) -> None:
        self._gateway = context.gateway

    async def live(self, request: Request) -> Response:
        return _json({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        if self._gateway.ready():
            return _json({"status": "ok"})
        response = _json({"status": "not ready"}, 503)
        response.headers["retry-after"] = "1"
        return response

    async def health(self, request: Request) -> Response:
        healthy, reason = self._gateway.health()
        return _json({"status": "ok"}) if healthy else _json({"status": "unhealthy", "reason": reason}, 503)

    async def status(self, request: Request) -> Response:
        return _json(self._gateway.status())

    async def version(self, request: Request) -> Response:
        model = self._gateway.model
        return _json(
            {"version": relay.__version__, "numerics_id": model.numerics_id, "model_digest": model.model_digest}
        )
