"""GET /v1/models and /v1/models/{id}."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from relay.api.context import Context
from relay.api.types import ModelCard, ModelList
from relay.api.validation import check_model


class ModelsEndpoint:
    """Lists the served names; all of them are the one model."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def _card(self, name: str) -> ModelCard:
        model = self._context.gateway.model
        return ModelCard(name, model.created, "relay", model.max_model_len, root=model.name)

    async def list(self, request: Request) -> Response:
        cards = [self._card(name) for name in self._context.served_names]
        return Response(msgspec.json.encode(ModelList(cards)), media_type="application/json")

    async def one(self, request: Request) -> Response:
        name = request.path_params["model"]
        check_model(name, self._context.served_names)
        return Response(msgspec.json.encode(self._card(name)), media_type="application/json")
