"""Chat messages as templates want them: content is always a string, text parts are joined, other fields pass through."""

from typing import Any

from relay.api.errors import ApiError

_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})


def parse_messages(messages: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Checked copies. Raises ApiError with ``param`` 'messages' (or the place within)."""
    if not messages:
        raise ApiError(
            "'messages' is required and must not be empty.", param="messages", code="missing_required_parameter"
        )
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _message(message: dict[str, Any], where: str) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise _bad(f"{where}.role", f"it must be one of {', '.join(sorted(_ROLES))}")
    content = message.get("content")
    if content is None and role != "assistant":  # an assistant that only called tools said nothing
        raise ApiError(f"'{where}.content' is required.", param=f"{where}.content", code="missing_required_parameter")
    return {**message, "content": "" if content is None else _content(content, f"{where}.content")}


def _content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _bad(where, "it must be a text or a list of text parts")
    texts = []
    for index, part in enumerate(content):
        text = (
            part.get("text")
            if isinstance(part, dict) and part.get("type") in ("text", "input_text", "output_text")
            else None
        )
        if not isinstance(text, str):
            raise _bad(f"{where}[{index}]", "only parts {'type': 'text', 'text': ...} are supported")
        texts.append(text)
    return "".join(texts)


def _bad(where: str, why: str) -> ApiError:
    return ApiError(f"Invalid value for '{where}': {why}.", param=where, code="invalid_value")
