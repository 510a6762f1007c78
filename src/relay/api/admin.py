"""Orders of operators: drain or restart workers. For callers on this machine alone.

A call must come from a loopback address, must not have passed a proxy, and must carry ``x-relay-admin``: a web page cannot make a
browser add that header to a request for another origin without being asked for permission first, which nobody gives here.
"""

from ipaddress import ip_address

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from relay.api.context import Context
from relay.api.errors import ApiError

HEADER = "x-relay-admin"
PROXY_HEADERS = ("forwarded", "x-forwarded-for", "x-real-ip", "via")
MAX_BODY_BYTES = 1 << 16


class LeaveBody(msgspec.Struct, forbid_unknown_fields=True):
    """``workers`` by id. Only a restart may leave them out, which means all of them."""

    workers: list[str] = []
    rolling: bool = False


class AdminEndpoint:
    """Answers 202 when the order was taken; ``/status`` tells how far it has come."""

    def __init__(self, context: Context) -> None:
        self._gateway = context.gateway

    async def drain(self, request: Request) -> Response:
        body = await self._body(request)
        if not body.workers or body.rolling:
            raise ApiError("Name the workers to drain.", status=400)
        return self._answer(self._gateway.leave(body.workers, stay_out=True))

    async def restart(self, request: Request) -> Response:
        body = await self._body(request)
        if not body.workers and not body.rolling:
            raise ApiError("Name the workers to restart, or ask for a rolling restart of all.", status=400)
        return self._answer(self._gateway.leave(body.workers, rolling=body.rolling))

    @staticmethod
    async def _body(request: Request) -> LeaveBody:
        host = request.client.host if request.client is not None else ""
        if not _is_loopback(host) or any(name in request.headers for name in PROXY_HEADERS):
            raise ApiError("Orders are taken from this machine only.", status=403)
        if HEADER not in request.headers:
            raise ApiError(f"The header {HEADER} is missing.", status=403)
        raw = bytearray()
        async for chunk in request.stream():
            raw += chunk
            if len(raw) > MAX_BODY_BYTES:
                raise ApiError("The body is too large.", status=413)
        try:
            return msgspec.json.decode(raw or b"{}", type=LeaveBody)
        except (msgspec.MsgspecError, RecursionError) as error:  # the latter: nested too deeply
            raise ApiError(f"Bad body: {error}", status=400) from error

    @staticmethod
    def _answer(problem: str) -> Response:
        if problem:
            raise ApiError(problem, status=409, code="not_possible_now")
        return Response(b'{"status":"accepted"}', status_code=202, media_type="application/json")


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
