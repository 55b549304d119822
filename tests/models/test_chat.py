from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from kvstrata.errors import ConfigError, RequestError
from kvstrata.models.chat import MAX_CHARS, ChatTemplate

HELLO = [{"role": "user", "content": "Hello"}]

CHATML = """{% for message in messages %}
    {% if loop.first and message.role != 'system' %}
{{ '<|im_start|>system\\nBe brief.<|im_end|>\\n' }}
    {% endif %}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


def render(template: str, messages: Any = HELLO, **variables: Any) -> str:
    return ChatTemplate(template, "<s>", "</s>").render(messages, **variables)


def test_messages_become_the_prompt_of_the_template() -> None:
    messages = [*HELLO, {"role": "assistant", "content": "Hi"}]
    assert render(CHATML, messages) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n\n<|im_start|>user\nHello<|im_end|>\n\n"
        "<|im_start|>assistant\nHi<|im_end|>\n\n<|im_start|>assistant\n"
    )
    assert not render(CHATML, add_generation_prompt=False).endswith("assistant\n")


def test_templates_know_the_names_they_are_written_for() -> None:
    now = datetime(2026, 5, 17)
    template = ChatTemplate(
        "{{ bos_token }}{{ strftime_now('%d %b %Y') }}{{ tools is none }}{{ eos_token }}",
        "<s>",
        "</s>",
        lambda: now,
    )
    assert template.render(HELLO) == "<s>17 May 2026True</s>"
    assert render("{{ enable_thinking }}", enable_thinking=False) == "False"
    assert render("{{ messages | tojson }}", [{"role": "user", "content": "é <b>"}]) == (
        '[{"role": "user", "content": "é <b>"}]'
    )
    assert (
        render("{% generation %}a{% endgeneration %}{% for i in range(9) %}{{ i }}{% break %}{% endfor %}")
        == "a0"
    )


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "a\nb"


def test_loops_keep_their_helpers() -> None:
    template = (
        "{% for x in range(4) if x != 1 %}{{ loop.index }}{{ x }}{{ loop.length }}{{ loop.last }} "
        "{% else %}none{% endfor %}{% for a, b in [(1, 2)] %}{{ a ~ '-' ~ b }}{% endfor %}"
        "{% for x in [] %}{% else %}none{% endfor %}"
    )
    assert render(template) == "103False 223False 333True 1-2none"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], r"messages: must be a list of one or more"),
        ("Hello", r"messages: must be a list of one or more, not str"),
        (["Hello"], r"messages\[0\]: must be an object with role and content, not str"),
        ([{"content": "a"}], r"messages\[0\]\.role: None"),
        ([*HELLO, {"role": "user"}], r"messages\[1\]\.content: must be a string or a list of text parts"),
        ([{"role": "user", "content": 3}], r"messages\[0\]\.content: .*not int"),
        ([{"role": "user", "content": []}], r"messages\[0\]\.content: "),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            r"content\[0\]: 'image_url' is not supported",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\]: 'text' is not supported"),
        ([{"role": "user", "content": ["a"]}], r"content\[0\]: 'str' is not supported"),
    ],
)
def test_malformed_messages_are_named(messages: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        render(CHATML, messages)


def test_an_answer_may_have_tool_calls_instead_of_content() -> None:
    messages = [{"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}]
    assert render("{{ messages[0].content }}{{ messages[0].tool_calls[0].name }}", messages) == "f"


def test_a_model_without_a_template_says_what_to_do() -> None:
    assert not ChatTemplate(None).available
    assert ChatTemplate("").available
    with pytest.raises(RequestError, match=r"no chat template; use generate .*--chat-template FILE"):
        ChatTemplate(None).render(HELLO)


def test_a_broken_template_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="no valid jinja template"):
        ChatTemplate("{% for %}")


def test_the_templates_own_refusal_reaches_the_user() -> None:
    with pytest.raises(RequestError, match="Roles must alternate"):
        render("{{ raise_exception('Roles must\nalternate') }}")


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages[0].__init__.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ (raise_exception.__globals__)['json'] }}",
        "{{ strftime_now.__closure__[0] }}",
        "{{ self._TemplateReference__context.environment.filters }}",
    ],
)
def test_a_template_reaches_nothing_of_python(template: str) -> None:
    with pytest.raises(RequestError, match=r"SecurityError|UndefinedError"):
        render(template)


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% set r = range(999) | list %}{% for i in r %}{% for j in r %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
        "{{ range(10 ** 9) }}",
        "{{ 'a' * 10 ** 12 }}",
        "{{ [1] * 10 ** 12 }}",
        "{{ 10 ** (10 ** 10) }}",
        "{% set n = namespace(s='aaaa') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
        "{% set n = namespace(s='aaaa') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}",
        "{% set s = 'a' * 99999 %}{% for i in range(9999) %}{{ s }}{% endfor %}",
    ],
)
def test_a_template_without_end_is_stopped(template: str) -> None:
    with pytest.raises(RequestError, match="chat template"):
        render(template)


def test_a_stopped_template_leaves_the_next_render_its_steps() -> None:
    template = ChatTemplate(
        "{% for i in range(messages[0].n) %}{% for j in range(999) %}{% endfor %}{% endfor %}"
    )
    with pytest.raises(RequestError):
        template.render([{**HELLO[0], "n": 999}])
    assert template.render([{**HELLO[0], "n": 1}]) == ""


def test_a_long_conversation_is_within_bounds() -> None:
    messages = [{"role": "user", "content": "word " * 200}] * 5000
    assert len(render(CHATML, messages)) < MAX_CHARS
