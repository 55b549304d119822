"""Keeping prompts from eviction: computed if need be, and pinned on the engine's thread."""

from __future__ import annotations

import asyncio
import uuid
from functools import partial

from starlette.requests import Request

from kvstrata.config import RequestOptions, SamplingParams
from kvstrata.engine.serving import Submission
from kvstrata.server.call import Call
from kvstrata.server.front import key_of
from kvstrata.server.problems import ApiError
from kvstrata.server.requests import PinRequest
from kvstrata.server.service import Service

_TIER_WAIT = 5.0  # seconds to wait until the tiers have what was just computed
_LOOK_EVERY = 0.02


async def pin(service: Service, request: Request, body: PinRequest) -> int:
    """Keep a prompt's full blocks; tokens kept. Raises ApiError, KVStrataError."""
    tokens, salt = await _meant(service, request, body)
    service.check_length(tokens)
    await _compute(service, request, tokens, salt)
    for _ in range(int(_TIER_WAIT / _LOOK_EVERY)):
        if not service.engine.settling:
            break
        await asyncio.sleep(_LOOK_EVERY)
    extras = service.engine.extras(RequestOptions(cache_salt=salt))
    held = partial(service.engine.pin, tokens, extras, body.ttl, wait=0.0)
    return await service.on_engine_thread(held)


async def unpin(service: Service, request: Request, body: PinRequest) -> bool:
    """Undo a pin; False if there was none. Raises ApiError, KVStrataError."""
    tokens, salt = await _meant(service, request, body)
    extras = service.engine.extras(RequestOptions(cache_salt=salt))
    return await service.on_engine_thread(partial(service.engine.unpin, tokens, extras))


async def _meant(service: Service, request: Request, body: PinRequest) -> tuple[list[int], str]:
    """The tokens of the prompt that is meant, and the salt that its blocks are under."""
    key = key_of(request.scope)
    if body.key is not None:
        key = service.keys.named(body.key)
        if key is None:
            raise ApiError(400, f"key is {body.key!r}; there is no such API key", param="key")
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "prompt: give either a prompt or messages", param="prompt")
    tokens = await service.in_text_thread(_tokens, service, body)
    return tokens, service.salt(body.cache_salt or "", key)


def _tokens(service: Service, body: PinRequest) -> list[int]:
    """Runs on a text thread."""
    served = service.served
    if body.messages is not None:
        text = served.chat_template.render(body.messages, add_generation_prompt=False)
        return served.tokenizer.encode(text, parse_special=True)
    return served.tokenizer.encode(body.prompt) if isinstance(body.prompt, str) else list(body.prompt or ())


async def _compute(service: Service, request: Request, tokens: list[int], salt: str) -> None:
    """Have the engine find or compute a prompt's blocks."""
    key = key_of(request.scope)
    admitted = service.admit("" if key is None else key.name, 1)
    call = Call(service.serving)
    service.calls.add(call)
    try:
        call.watch(request.receive)
        params = SamplingParams(temperature=0, max_tokens=1)
        options = RequestOptions(cache_salt=salt)
        call.submit([Submission(uuid.uuid4().hex, tokens, params, options=options)], whole=True)
        await call.all_results()
        failure = call.failure()
        if failure is not None:
            raise failure
    finally:
        call.close()
        service.calls.discard(call)
        admitted()
