"""What clients may send: the field's request bodies, and our own fields beside them.

Fields that would change the answer and that are not supported are refused; fields that only tell who asks or
why are taken and not used.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from kvstrata.cache.retention import Retention
from kvstrata.config import RequestOptions, SamplingParams
from kvstrata.errors import ConfigError
from kvstrata.server.problems import ApiError

Finite = Annotated[float, Field(allow_inf_nan=False)]


def _whole(value: Any) -> Any:
    """5.0 is a whole number in JSON."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(_whole)]


# One wrong entry is enough to refuse a list: a body can hold hundreds of thousands.
Texts = Annotated[list[str], Field(fail_fast=True)]
Ids = Annotated[list[int], Field(fail_fast=True)]
Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]


def _told(low: float, high: float | None = None) -> Any:
    """A field whose bounds the description tells; `SamplingParams` checks them, in words of its own."""
    bounds: dict[str, Any] = {"minimum": low} if high is None else {"minimum": low, "maximum": high}
    return Field(None, json_schema_extra=bounds)


UNKNOWN = "unknown_field"  # a kind of validation error
_SHOWN = 200  # characters of what a client sent that an error repeats


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _known_fields_only(cls, body: Any) -> Any:
        """Refuse the first unknown field, before there is an error for each of however many there are."""
        unknown = (name for name in body if name not in cls.model_fields) if isinstance(body, dict) else ()
        for name in unknown:
            # Half a surrogate pair, which JSON can spell and UTF-8 cannot, is shown as an escape.
            shown = str(name)[:_SHOWN].encode(errors="backslashreplace").decode()
            raise PydanticCustomError(UNKNOWN, "there is no such field", {"name": shown})
        return body


class StreamOptions(_Body):
    """include_usage: a last chunk tells the tokens used."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class KVStrataOptions(_Body):
    """ttl: seconds that the blocks of this request stay cached. retention: which tokens a query sees, `full`,
    `window:W` (the last W) or `sinks:S+W` (the first S besides); absent: the server's.
    """

    ttl: Annotated[float, Field(gt=0, le=1e12, allow_inf_nan=False)] | None = None
    retention: str | None = None


class GenerationRequest(_Body):
    """The fields that both endpoints take; null is as good as absent."""

    model: str | None = Field(None, description="The name that /v1/models tells; absent: the model served.")
    n: Whole | None = _told(1, 128)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Whole | None = _told(0)
    temperature: Finite | None = _told(0, 100)
    top_p: Finite | None = Field(None, json_schema_extra={"exclusiveMinimum": 0, "maximum": 1})
    presence_penalty: Finite | None = _told(-2, 2)
    frequency_penalty: Finite | None = _told(-2, 2)
    seed: Whole | None = None
    stop: str | Texts | None = None
    user: str | None = None
    logit_bias: dict[str, Any] | None = Field(None, description="Not supported.")
    # As in vLLM.
    top_k: Whole | None = _told(-1)
    min_p: Finite | None = _told(0, 1)
    repetition_penalty: Finite | None = _told(0.01, 100)
    min_tokens: Whole | None = _told(0)
    ignore_eos: bool | None = None
    stop_token_ids: Ids | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    priority: Whole | None = Field(None, description="Lower goes first.")
    cache_salt: Annotated[str, Field(max_length=1024)] | None = Field(
        None, description="Cached blocks are shared only among requests of one salt."
    )
    # Our own.
    kvstrata: KVStrataOptions | None = None

    def refuse_unsupported(self) -> None:
        """Raise ApiError for a field that asks for what this server does not do."""
        for name in self.unsupported():
            raise ApiError(400, f"{name} is not supported; leave it out", code="unsupported", param=name)

    def unsupported(self) -> list[str]:
        """Names of fields that are set and not supported."""
        found = ["logit_bias"] if self.logit_bias else []
        return found

    def params(self, **own: Any) -> SamplingParams:
        """The sampling parameters, with the endpoint's own. Raises ConfigError."""
        names = (
            "n",
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
            "stop",
            "stop_token_ids",
            "ignore_eos",
            "min_tokens",
            "skip_special_tokens",
            "include_stop_str_in_output",
        )
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        # The field's seeds are signed, ours are not.
        seed = None if self.seed is None else self.seed % 2**64
        return SamplingParams(**{**given, **own}, seed=seed, retention=self._retention())

    def _retention(self) -> str | None:
        wanted = None if self.kvstrata is None else self.kvstrata.retention
        if wanted is not None:
            try:
                Retention.parse(wanted, "kvstrata.retention")
            except ConfigError as error:
                raise ApiError(400, str(error), code="invalid_value", param="kvstrata.retention") from error
        return wanted

    def options(self, *, cache_salt: str, user: str) -> RequestOptions:
        """How the request is served. Raises ConfigError."""
        return RequestOptions(
            cache_salt=cache_salt,
            priority=self.priority or 0,
            user=user,
            ttl=self.kvstrata.ttl if self.kvstrata is not None else None,
        )


class ChatRequest(GenerationRequest):
    """A body of `/v1/chat/completions`."""

    messages: Objects = Field(
        min_length=1,
        json_schema_extra={
            "items": {
                "type": "object",
                "required": ["role", "content"],
                "properties": {"role": {"type": "string", "minLength": 1}, "content": {"type": "string"}},
            }
        },
    )
    max_completion_tokens: Whole | None = _told(1)
    logprobs: bool | None = None
    top_logprobs: Annotated[Whole, Field(ge=0, le=20)] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Further names for the chat template."
    )
    response_format: dict[str, Any] | None = Field(None, description="Only {'type': 'text'}.")
    tools: Objects | None = Field(None, description="Not supported.")
    tool_choice: str | dict[str, Any] | None = Field(None, description="Only 'none' and 'auto'.")
    functions: Objects | None = Field(None, description="Not supported.")
    modalities: Texts | None = Field(None, description="Only ['text'].")
    # Taken and not used.
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    parallel_tool_calls: bool | None = None

    def unsupported(self) -> list[str]:
        """Names of fields that are set and not supported."""
        found = super().unsupported()
        found += [name for name in ("tools", "functions") if getattr(self, name)]
        if self.tool_choice not in (None, "none", "auto"):
            found.append("tool_choice")
        if self.response_format is not None and self.response_format.get("type") != "text":
            found.append("response_format")
        if self.modalities not in (None, [], ["text"]):
            found.append("modalities")
        return found

    def sampling(self) -> SamplingParams:
        """The sampling parameters; without a limit the answer may fill the context. Raises ConfigError."""
        limit = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs goes with logprobs: true", param="top_logprobs")
        return self.params(max_tokens=limit, logprobs=(self.top_logprobs or 0) if self.logprobs else None)

    def template_variables(self) -> dict[str, Any]:
        """Further names for the chat template. Raises ApiError for those that are not theirs to give."""
        variables = self.chat_template_kwargs or {}
        for name in ("messages", "add_generation_prompt", "self"):
            if name in variables:
                raise ApiError(
                    400, f"chat_template_kwargs has {name!r}, which is not for it to give", param=name
                )
        return variables


class CompletionRequest(GenerationRequest):
    """A body of `/v1/completions`."""

    prompt: str | Texts | Ids | Annotated[list[Ids], Field(fail_fast=True)] = Field(
        json_schema_extra={"minLength": 1, "minItems": 1}
    )
    echo: bool | None = None
    logprobs: Annotated[Whole, Field(ge=0, le=20)] | None = None
    add_special_tokens: bool | None = None
    best_of: Whole | None = Field(None, description="Only as many as n.")
    suffix: str | None = Field(None, description="Not supported.")

    def unsupported(self) -> list[str]:
        """Names of fields that are set and not supported."""
        found = super().unsupported()
        if self.suffix:
            found.append("suffix")
        if self.best_of not in (None, self.n or 1):
            found.append("best_of")
        return found

    @property
    def echo_only(self) -> bool:
        """Whether nothing but the prompt is wanted."""
        return bool(self.echo) and self.max_tokens == 0

    def sampling(self) -> SamplingParams:
        """The sampling parameters. Raises ConfigError."""
        # The engine answers with one token at least; where only the prompt is wanted, it is not shown.
        limit = 1 if self.echo_only else 16 if self.max_tokens is None else self.max_tokens
        return self.params(
            max_tokens=limit,
            logprobs=self.logprobs,
            prompt_logprobs=self.logprobs if self.echo else None,
        )

    def prompts(self) -> list[str | list[int]]:
        """The prompts one by one. Raises ApiError where there are none."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not prompt:
            raise ApiError(400, "prompt is an empty list; give at least one prompt", param="prompt")
        if isinstance(prompt[0], int):
            return [[token for token in prompt if isinstance(token, int)]]
        return [entry for entry in prompt if not isinstance(entry, int)]


class ResetRequest(_Body):
    """A body of `/v1/cache/reset`, if there is one. tiers: remove the model's blocks from the tiers too."""

    tiers: bool | None = None


class MembersRequest(_Body):
    """A body of `/v1/cache/members`: the servers of the valkey tier from now on.

    servers: `host:port,host:port`. weights: `2,1`, one for each.
    """

    servers: Annotated[str, Field(min_length=1, max_length=4096)]
    weights: Annotated[str, Field(max_length=4096)] | None = None


class PinRequest(_Body):
    """A body of `/v1/cache/pin` and `/v1/cache/unpin`: a prompt, or messages, whose blocks are meant."""

    prompt: str | Ids | None = None
    messages: Objects | None = None
    key: str | None = Field(
        None,
        description="Name of the API key whose requests will find the blocks; by default the admin's own.",
    )
    cache_salt: Annotated[str, Field(max_length=1024)] | None = None
    ttl: Annotated[float, Field(gt=0, le=1e12, allow_inf_nan=False)] | None = None
