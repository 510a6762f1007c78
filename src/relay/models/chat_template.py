"""A model's chat template, rendered in jinja2's immutable sandbox with the functions Hugging Face templates expect.

Templates come with the model file, so they are bounded: in size, in the length of their output and in time.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from relay.clock import Clock, MonotonicClock, local_time

MAX_TEMPLATE_CHARACTERS = 256 * 1024
MAX_OUTPUT_CHARACTERS = 16 * 1024 * 1024
TIME_LIMIT_NS = 5_000_000_000

Message = Mapping[str, Any]


class ChatTemplateError(ValueError):
    """The template is damaged, refused these messages, or went over a bound; the text says which."""


class ChatTemplate:
    """A compiled template; ``render`` may be called from any thread."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        now: Callable[[], datetime] = local_time,
        clock: Clock | None = None,
    ) -> None:
        """``special_tokens`` (``bos_token``…) are visible to the template; ``now`` is what ``strftime_now`` formats."""
        if len(source) > MAX_TEMPLATE_CHARACTERS:
            raise ChatTemplateError(f"the chat template has {len(source)} characters, over {MAX_TEMPLATE_CHARACTERS}")
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._clock = clock or MonotonicClock()
        self._now = now
        try:
            self._code = self._environment(None).compile(source)
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the chat template is damaged: {error}") from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text. ``variables`` (OpenAI clients' ``chat_template_kwargs``) are visible to the template, but
        replace nothing given here.

        Content None becomes "", a list of text parts is joined, other keys that are None vanish. Raises ChatTemplateError.
        """
        environment = self._environment(self._clock.now_ns() + TIME_LIMIT_NS)
        template = jinja2.Template.from_code(environment, self._code, environment.make_globals(None))
        try:
            context = {
                **self._special_tokens,
                **{name: _plain(value) for name, value in (variables or {}).items()},
                "messages": [_plain_message(message) for message in messages],
                "tools": None if tools is None else [_plain(tool) for tool in tools],
                "documents": None,
                "add_generation_prompt": add_generation_prompt,
            }
        except RecursionError as error:
            raise ChatTemplateError("messages and variables are nested too deeply") from error
        pieces: list[str] = []
        length = 0
        try:
            for piece in template.generate(context):
                environment.check_time()
                pieces.append(piece)
                length += len(piece)
                if length > MAX_OUTPUT_CHARACTERS:
                    raise ChatTemplateError(f"the chat template wrote over {MAX_OUTPUT_CHARACTERS} characters")
        except jinja2.TemplateError as error:
            raise ChatTemplateError(error.message or type(error).__name__) from error
        except (TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError, RecursionError) as error:
            if isinstance(error, ChatTemplateError):
                raise
            raise ChatTemplateError(f"the chat template failed on these messages: {error}") from error
        return "".join(pieces)

    def _environment(self, deadline_ns: int | None) -> "_Environment":
        return _Environment(self._clock, deadline_ns, self._now)


class _Generation(jinja2.ext.Extension):
    """``{% generation %}…{% endgeneration %}`` marks the assistant's text for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own attribute

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox of one rendering: every call and attribute access checks the deadline, so loops end; products are bounded."""

    intercepted_binops = frozenset(["*", "**"])

    def __init__(self, clock: Clock, deadline_ns: int | None, now: Callable[[], datetime]) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
        self._clock = clock
        self._deadline_ns = deadline_ns
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda format: now().strftime(format)

    def check_time(self) -> None:
        if self._deadline_ns is not None and self._clock.now_ns() > self._deadline_ns:
            raise ChatTemplateError(f"the chat template ran for over {TIME_LIMIT_NS / 1e9:g} s")

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        __self.check_time()
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" or not (isinstance(left, int | float) and isinstance(right, int | float)):
            size = max((abs(x) if isinstance(x, int | float) else len(x)) for x in (left, right))
            if size > MAX_TEMPLATE_CHARACTERS:
                raise ChatTemplateError(f"the chat template multiplies by {size}")
        return super().call_binop(context, operator, left, right)

    def getattr(self, obj: Any, attribute: str) -> Any:
        self.check_time()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        self.check_time()
        return super().getitem(obj, argument)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: jinja2's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _plain_message(message: Message) -> dict[str, Any]:
    plain = {key: _plain(value) for key, value in message.items() if value is not None}
    plain["content"] = _text(message.get("content"))
    if plain.get("tool_calls"):
        plain["tool_calls"] = [_plain_tool_call(call) for call in plain["tool_calls"]]
    return plain


def _text(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise ChatTemplateError(
            f"message content must be a string or a list of text parts, not {type(content).__name__}"
        )
    texts = []
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ChatTemplateError("message content parts must be of type text: this model reads nothing else")
        texts.append(part["text"])
    return "".join(texts)


def _plain_tool_call(call: Any) -> Any:
    """OpenAI clients send a tool call's arguments as a string of JSON; templates expect the object."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _plain(value: Any) -> Any:
    """Only JSON's own types reach a template: nothing in it can carry methods of ours."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_plain(item) for item in value]
    raise ChatTemplateError(f"messages and tools must be JSON, not {type(value).__name__}")
