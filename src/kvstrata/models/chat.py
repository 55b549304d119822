"""Chat templates: from messages to the prompt text that a model was trained on.

Templates come with model files, so they run in jinja's sandbox: no attribute of Python's own is reachable and
nothing can be changed. Steps (loop turns and calls), strings and output are bounded: none runs for ever.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from kvstrata.errors import ConfigError, RequestError

MAX_STEPS = 200_000
MAX_CHARS = 16 * 1024 * 1024

_TURNS = "_counted_turns"  # filters of our own, not for templates to call
_CONCAT = "_measured_concat"


class _TemplateStopped(Exception):  # noqa: N818  (an outcome of the template, reported as RequestError)
    """What ends a render on purpose: `raise_exception` of the template, or a bound."""


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}`, which marks answers for training: rendered as its body."""

    tags = {"generation"}  # noqa: RUF012  (the extension interface wants this attribute)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _BoundedEnvironment(ImmutableSandboxedEnvironment):
    """jinja's sandbox, counting calls and loop turns against `steps_left` and looking at sizes beforehand."""

    intercepted_binops = frozenset(("+", "*", "**"))

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
        self.steps_left = 0
        self.filters[_TURNS] = self._turns
        self.filters[_CONCAT] = _concat
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise_exception
        del self.globals["lipsum"]

    def _step(self) -> None:
        self.steps_left -= 1
        if self.steps_left < 0:
            raise _TemplateStopped(f"it takes more than {MAX_STEPS} steps")

    def _turns(self, items: Iterable[object]) -> Iterator[object]:
        for item in items:
            self._step()
            yield item

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        bounded: nodes.Template = _BoundingTransformer().visit(template)
        return bounded

    def call(self, context: Context, function: Any, *args: Any, **kwargs: Any) -> Any:
        """A call of the template, counted."""
        self._step()
        return super().call(context, function, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """A sum, product or power, computed if its result is small enough."""
        _check_size(_size(operator, left, right))
        return super().call_binop(context, operator, left, right)


class _BoundingTransformer(NodeTransformer):
    """Leads loops and `~` through filters that count and measure."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802  (the visitor's naming)
        self.generic_visit(node)
        if not node.recursive:  # a recursive loop is a call, which is counted
            node.iter = nodes.Filter(node.iter, _TURNS, [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:  # noqa: N802
        self.generic_visit(node)
        operands = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(operands, _CONCAT, [], [], None, None, lineno=node.lineno)


def _concat(operands: Sequence[object]) -> str:
    texts = [str(operand) for operand in operands]
    _check_size(sum(map(len, texts)))
    return "".join(texts)


def _check_size(size: float) -> None:
    if size > MAX_CHARS:
        raise _TemplateStopped(f"it makes a value of more than {MAX_CHARS} characters")


def _size(operator: str, left: Any, right: Any) -> float:
    """Roughly how long the result of an operation is."""
    if operator == "**":
        return (
            abs(right) * math.log2(abs(left) + 2) if isinstance(left, int) and isinstance(right, int) else 0
        )
    lengths = [len(side) if isinstance(side, Sequence) else 0 for side in (left, right)]
    if operator == "+":
        return sum(lengths)
    times = right if isinstance(right, int) else left
    return max(lengths) * times if isinstance(times, int) else 0


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """JSON as Transformers writes it in templates: no HTML escapes, no ASCII escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: object) -> None:
    raise _TemplateStopped(str(message))


class ChatTemplate:
    """One model's chat template.

    template: jinja source; None for a model without one, whose `render` explains what to do. bos_token,
    eos_token: texts the template may use. now: the clock behind `strftime_now`.
    """

    def __init__(
        self,
        template: str | None,
        bos_token: str = "",
        eos_token: str = "",
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self._environment = _BoundedEnvironment()
        self._lock = threading.Lock()  # the step counter belongs to one render at a time
        self._variables = {
            "bos_token": bos_token,
            "eos_token": eos_token,
            "strftime_now": lambda form: now().strftime(form),
        }
        self._template: jinja2.Template | None = None
        if template is not None:
            try:
                self._template = self._environment.from_string(template)
            except (jinja2.TemplateError, RecursionError) as error:
                raise ConfigError(f"chat_template: is no valid jinja template: {_one_line(error)}") from error

    @property
    def available(self) -> bool:
        """Whether the model has a template."""
        return self._template is not None

    def render(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The prompt for messages; encode it with `parse_special=True`.

        messages: mappings with `role` and `content`, a string or parts `{"type": "text", "text": ...}` that
        are joined by newlines; other keys reach the template as they are. variables: further names for the
        template (`tools`, `enable_thinking`). Raises RequestError for messages that are not of this form,
        for what the template refuses, and for a model without a template.
        """
        if self._template is None:
            raise RequestError(
                "messages: the model has no chat template; use generate with a plain prompt, "
                "or give a template with --chat-template FILE"
            )
        values = {
            **self._variables,
            "tools": None,
            "documents": None,
            **variables,
            "messages": _checked(messages),
            "add_generation_prompt": add_generation_prompt,
        }
        with self._lock:
            self._environment.steps_left = MAX_STEPS
            return self._join(self._template, values)

    @staticmethod
    def _join(template: jinja2.Template, values: Mapping[str, Any]) -> str:
        parts, length = [], 0
        try:
            for part in template.generate(values):
                parts.append(part)
                length += len(part)
                if length > MAX_CHARS:
                    raise _TemplateStopped(f"its output is longer than {MAX_CHARS} characters")
        except _TemplateStopped as error:
            raise RequestError(f"messages: the chat template refuses them: {_one_line(error)}") from error
        except Exception as error:  # templates can raise whatever an expression can
            raise RequestError(
                f"messages: the chat template fails on them: {type(error).__name__}: {_one_line(error)}"
            ) from error
        return "".join(parts)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _checked(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise RequestError(
            f"messages: must be a list of one or more, not {type(messages).__name__} {str(messages)[:40]!r}"
        )
    return [_checked_message(index, message) for index, message in enumerate(messages)]


def _checked_message(index: int, message: object) -> dict[str, Any]:
    field = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise RequestError(f"{field}: must be an object with role and content, not {type(message).__name__}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(f"{field}.role: {role!r}; must be a string such as 'user'")
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return {**message, "content": ""}
    if isinstance(content, str):
        return dict(message)
    if not isinstance(content, Sequence) or isinstance(content, bytes) or not content:
        raise RequestError(
            f"{field}.content: must be a string or a list of text parts, not {type(content).__name__}"
        )
    return {**message, "content": "\n".join(_part_text(field, n, part) for n, part in enumerate(content))}


def _part_text(field: str, index: int, part: object) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    text = part.get("text") if isinstance(part, Mapping) and kind == "text" else None
    if not isinstance(text, str):
        raise RequestError(
            f"{field}.content[{index}]: {kind!r} is not supported; give {{'type': 'text', 'text': '...'}}"
        )
    return text
