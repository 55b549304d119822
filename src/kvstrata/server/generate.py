"""`/v1/chat/completions` and `/v1/completions`: from a body to a whole answer or a stream of events."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from kvstrata.config import SamplingParams
from kvstrata.engine.serving import Submission
from kvstrata.errors import KVStrataError
from kvstrata.server.call import Batch, Call
from kvstrata.server.front import body_send, key_of, line_of
from kvstrata.server.problems import ApiError, api_error
from kvstrata.server.replies import DONE, ChatReply, CompletionReply, Head, Reply
from kvstrata.server.requests import ChatRequest, CompletionRequest, GenerationRequest
from kvstrata.server.service import Service
from kvstrata.server.shapes import ChatCompletion, Completion, ErrorBody

PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody} for status in (400, 401, 404, 413, 429, 500, 503, "default")
}
# As text, so that the shapes of replies are what /openapi.json shows.
_STREAM = {"content": {"text/event-stream": {"schema": {"type": "string"}}}}


@dataclass(frozen=True)
class Prepared:
    """A request that is understood: its prompts as tokens, and how its answers are told."""

    prompts: Sequence[list[int]]
    params: SamplingParams
    reply: Reply


def router(service: Service) -> APIRouter:
    """The endpoints that generate."""
    routes = APIRouter(tags=["generate"], responses=PROBLEMS)

    @routes.post("/v1/chat/completions", responses={200: {"model": ChatCompletion, **_STREAM}})
    async def chat_completions(request: Request, body: ChatRequest) -> Response:
        """Answer a conversation in the model's chat format."""
        return await _answer(service, request, body, 1, lambda reply_id: _chat(service, body, reply_id))

    @routes.post("/v1/completions", responses={200: {"model": Completion, **_STREAM}})
    async def completions(request: Request, body: CompletionRequest) -> Response:
        """Continue one text or several, as they are."""
        prompts = body.prompts()
        return await _answer(
            service,
            request,
            body,
            len(prompts),
            lambda reply_id: _completion(service, body, prompts, reply_id),
        )

    return routes


def _chat(service: Service, body: ChatRequest, reply_id: str) -> Prepared:
    """Runs on a text thread."""
    served = service.served
    text = served.chat_template.render(
        body.messages,
        add_generation_prompt=body.add_generation_prompt is not False,
        **body.template_variables(),
    )
    tokens = served.tokenizer.encode(text, parse_special=True)
    head = Head(f"chatcmpl-{reply_id}", service.now(), served.name)
    reply = ChatReply(body, head, served.tokenizer)
    return Prepared([tokens], body.sampling(), reply)


def _completion(
    service: Service, body: CompletionRequest, prompts: Sequence[str | list[int]], reply_id: str
) -> Prepared:
    """Runs on a text thread."""
    tokenizer = service.served.tokenizer
    special = body.add_special_tokens is not False
    tokens = [tokenizer.encode(p, special) if isinstance(p, str) else p for p in prompts]
    texts = [(p if isinstance(p, str) else tokenizer.decode(p)) if body.echo else "" for p in prompts]
    head = Head(f"cmpl-{reply_id}", service.now(), service.served.name)
    reply = CompletionReply(body, head, tokenizer, list(zip(texts, tokens, strict=True)))
    return Prepared(tokens, body.sampling(), reply)


async def _answer(
    service: Service,
    request: Request,
    body: GenerationRequest,
    prompts: int,
    prepare: Callable[[str], Prepared],
) -> Response:
    key, line = key_of(request.scope), line_of(request.scope)
    line.stream = bool(body.stream)
    try:
        service.check_request(body, key, prompts)
        options = service.options(body, key)
        admitted = service.admit("" if key is None else key.name, prompts)
    except KVStrataError as error:
        raise api_error(error, type(body).model_fields) from error
    call = Call(service.serving)
    answer = _Answer(service, call, request, body, admitted)
    service.calls.add(call)
    try:
        call.watch(request.receive)
        reply_id = uuid.uuid4().hex
        prepared = await service.in_text_thread(prepare, reply_id)
        if service.config.log_prompts:
            line.prompts = body.model_dump(include={"messages", "prompt"}, exclude_none=True)
        for tokens in prepared.prompts:
            service.check_length(tokens, prepared.params.retention)
        submissions = [
            Submission(f"{reply_id}-{number}", tokens, prepared.params, options=options, arrival=line.arrival)
            for number, tokens in enumerate(prepared.prompts)
        ]
        call.submit(submissions, whole=not body.stream)
        if body.stream:
            first = await call.next()
            _raise_failure(call)
            return EventStream(answer, prepared.reply, first)
        results = await call.all_results()
        _raise_failure(call)
        answer.close()
        return JSONResponse(prepared.reply.body(results))
    except BaseException as error:
        answer.close(error)
        if isinstance(error, KVStrataError):
            raise api_error(error, type(body).model_fields) from error
        raise


def _raise_failure(call: Call) -> None:
    failure = call.failure()
    if failure is not None:
        raise failure


class _Answer:
    """What has to be let go of when an answer has ended, however it did."""

    def __init__(
        self,
        service: Service,
        call: Call,
        request: Request,
        body: GenerationRequest,
        admitted: Callable[[], None],
    ) -> None:
        self.call = call
        self.line = line_of(request.scope)
        self._request = request
        self._body = body
        self._service = service
        self._admitted = admitted
        self._closed = False

    def close(self, error: BaseException | None = None) -> None:
        """Count, log and trace what has come, and make room for others; harmless the second time.

        error: what the request ended with, if it did.
        """
        if self._closed:
            return
        self._closed = True
        self.call.close()
        self._service.calls.discard(self.call)
        self._admitted()
        results = list(self.call.results.values())
        for result in results:
            self._service.count(result)
        self.line.note(results, with_texts=self._service.config.log_prompts)
        if self._service.tracing is not None:
            model = self._service.served.name
            told = api_error(error) if isinstance(error, Exception) else None
            self._service.tracing.record(
                self.line, self._body, results, model=model, headers=self._request.headers, error=told
            )


class EventStream(Response):
    """Server-sent events as the engine delivers.

    It begins once the first deltas are there, so that a request which fails before is told by its status.
    """

    media_type = "text/event-stream"

    def __init__(self, answer: _Answer, reply: Reply, first: Batch) -> None:
        self.status_code = 200
        self.background = None
        self._answer = answer
        self._reply = reply
        self._first = first
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until the answer's end, or until its client leaves."""
        call = self._answer.call
        failure: Exception | None = None
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            send_part = body_send(scope)
            last = b""
            try:
                batch = self._first
                while batch:
                    if events := self._reply.events(batch):
                        await send_part({"type": "http.response.body", "body": events, "more_body": True})
                    batch = await call.next()
                _raise_failure(call)
                last = self._reply.last_event(call.results.values())
            except (ApiError, KVStrataError) as error:
                failure = error
                self._answer.line.error = str(error)
                last = b"data: " + json.dumps(api_error(error).body()).encode() + b"\n\n"
            await send({"type": "http.response.body", "body": last + DONE, "more_body": False})
        finally:
            self._answer.close(failure)
