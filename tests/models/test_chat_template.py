"""Chat templates: equal to transformers' on over 20 conversations × 5 templates, safe and bounded."""

from datetime import datetime

import pytest
from chat_templates import CONVERSATIONS, TEMPLATES

from relay.models.chat_template import MAX_TEMPLATE_CHARACTERS, ChatTemplate, ChatTemplateError
from relay.models.store import LoadedModel

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
NOON = datetime(2024, 7, 5, 12, 0)


def render(template: str, messages: list | None = None, **options) -> str:
    return ChatTemplate(template, SPECIAL, now=lambda: NOON).render(
        messages if messages is not None else [{"role": "user", "content": "hi"}], **options
    )


@pytest.fixture(scope="module")
def peer():
    """transformers' rendering, on a tokenizer with the same special tokens."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from tokenizers import Tokenizer, models

    backend = Tokenizer(models.BPE({"<s>": 0, "</s>": 1, "<unk>": 2}, []))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **SPECIAL)


def assert_equal_to_peer(peer, source: str, now) -> int:
    compared = 0
    template = ChatTemplate(source, SPECIAL, now=now)
    for messages, tools, variables in CONVERSATIONS:
        for prompt in (True, False):

            def theirs(messages=messages, tools=tools, variables=variables, prompt=prompt) -> str:
                return peer.apply_chat_template(
                    messages,
                    chat_template=source,
                    tools=tools,
                    add_generation_prompt=prompt,
                    tokenize=False,
                    **variables,
                )

            try:
                expected = theirs()
            except Exception:  # a template's own refusal: ours must refuse as well
                with pytest.raises(ChatTemplateError):
                    template.render(messages, tools=tools, add_generation_prompt=prompt, variables=variables)
                continue
            assert template.render(messages, tools=tools, add_generation_prompt=prompt, variables=variables) == expected
            compared += 1
    return compared


@pytest.mark.peers
@pytest.mark.parametrize("name", TEMPLATES)
def test_equal_to_transformers(name: str, peer) -> None:
    assert len(CONVERSATIONS) >= 20
    assert assert_equal_to_peer(peer, TEMPLATES[name], datetime.now) >= 44


@pytest.mark.peers
def test_smollm2s_own_template_equals_transformers(smollm2: LoadedModel, peer) -> None:
    assert assert_equal_to_peer(peer, smollm2.tokenizer_files.chat_template, datetime.now) == 2 * len(CONVERSATIONS)


def test_chatml_in_full() -> None:
    text = render(TEMPLATES["chatml"], [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}])
    assert text == "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"
    assert not render(TEMPLATES["chatml"], add_generation_prompt=False).endswith("assistant\n")


def test_date_comes_from_the_clock_given() -> None:
    assert "Today Date: 05 Jul 2024" in render(TEMPLATES["llama3"])


def test_content_none_and_parts() -> None:
    template = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "assistant", "content": None}, {"role": "user", "content": parts}, {"role": "user"}]
    assert render(template, messages) == "[][ab][]"
    for bad in ([{"type": "image_url", "image_url": {}}], 5, [{"type": "text", "text": None}], ["a"]):
        with pytest.raises(ChatTemplateError, match="content"):
            render(template, [{"role": "user", "content": bad}])


def test_keys_that_are_none_vanish() -> None:
    assert (
        render("{{ messages[0].tool_calls is defined }}", [{"role": "user", "content": "", "tool_calls": None}])
        == "False"
    )


def test_tool_call_arguments_arrive_as_objects() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1, "<é>"]}'}}
    template = "{{ messages[0].tool_calls[0].function.arguments | tojson }}"
    assert render(template, [{"role": "assistant", "content": None, "tool_calls": [call]}]) == '{"a": [1, "<é>"]}'
    call["function"]["arguments"] = "not json"
    assert render(template, [{"role": "assistant", "content": None, "tool_calls": [call]}]) == '"not json"'


def test_template_errors_are_of_one_kind() -> None:
    with pytest.raises(ChatTemplateError, match="damaged"):
        ChatTemplate("{% for %}", SPECIAL)
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        render(TEMPLATES["mistral"], [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}])
    for source in (
        "{{ missing.attribute }}",
        "{{ 1 / 0 }}",
        "{{ 'a' + 1 }}",
        "{{ messages[0].content | nosuchfilter }}",
    ):
        with pytest.raises(ChatTemplateError):
            render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_sandbox(source: str) -> None:
    with pytest.raises(ChatTemplateError):
        render(source)


@pytest.mark.parametrize("source", ["{{ raise_exception.__globals__ }}", "{{ '{0.__class__}'.format(messages) }}"])
def test_unsafe_attributes_show_nothing(source: str) -> None:
    assert render(source) == ""


def test_messages_are_never_changed() -> None:
    messages = [{"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}]
    before = repr(messages)
    render(TEMPLATES["qwen"], messages)
    assert repr(messages) == before


class SteppingClock:
    """A second passes at every look."""

    def __init__(self) -> None:
        self.now = 0

    def now_ns(self) -> int:
        self.now += 1_000_000_000
        return self.now


def test_bounds() -> None:
    with pytest.raises(ChatTemplateError, match="characters"):
        ChatTemplate("x" * (MAX_TEMPLATE_CHARACTERS + 1), SPECIAL)
    slow = ChatTemplate(
        "{% for i in range(9) %}{% for j in range(9) %}{% endfor %}{% endfor %}", SPECIAL, clock=SteppingClock()
    )
    with pytest.raises(ChatTemplateError, match="ran for over 5 s"):
        slow.render([])
    with pytest.raises(ChatTemplateError, match="wrote over"):
        render("{% for i in range(90000) %}{{ 'x' * 1000 }}{% endfor %}")
    for source in ("{{ 'x' * 10**9 }}", "{{ 10**10**10 }}", "{{ [1] * 999999999 }}", "{{ range(10**9) | list }}"):
        with pytest.raises(ChatTemplateError):
            render(source)


def test_values_of_other_types_never_reach_a_template() -> None:
    with pytest.raises(ChatTemplateError, match="must be JSON"):
        render("{{ messages[0].extra }}", [{"role": "user", "content": "", "extra": object()}])


def test_variables_replace_no_argument() -> None:
    variables = {"messages": [], "add_generation_prompt": False, "bos_token": "B", "flag": 3}
    template = "{{ messages | length }} {{ add_generation_prompt }} {{ bos_token }} {{ flag }}"
    assert render(template, variables=variables) == "1 True B 3"


def test_nesting_too_deep_for_python_is_refused() -> None:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    template = ChatTemplate("{{ messages[0].content }}", {})
    with pytest.raises(ChatTemplateError, match="nested too deeply"):
        template.render([{"role": "user", "content": "x"}], variables={"deep": deep})
    with pytest.raises(ChatTemplateError, match="nested too deeply"):
        template.render([{"role": "user", "content": "x", "extra": deep}])
    while deep:  # freed level by level: letting Python do it would nest as deeply again
        deep = deep.pop()  # type: ignore[assignment]
