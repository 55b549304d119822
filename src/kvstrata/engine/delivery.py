"""From sampled tokens to what the caller sees: text, stop conditions, deltas, results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from kvstrata.config import SamplingParams
from kvstrata.engine.outputs import CompletionOutput, Delta, Logprob, RequestOutput, Timings, Usage
from kvstrata.engine.request import Request, Status
from kvstrata.engine.request import Sequence as Answer
from kvstrata.engine.sampler import RankedToken
from kvstrata.engine.scheduler import Scheduler
from kvstrata.engine.telemetry import Telemetry
from kvstrata.models.tokenizer import Tokenizer


class Delivery:
    """Adds tokens to answers, ends those that are done, and collects deltas until they are taken."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        scheduler: Scheduler,
        eos_ids: frozenset[int],
        telemetry: Telemetry,
        clock: Callable[[], float],
    ) -> None:
        self._tokenizer = tokenizer
        self._scheduler = scheduler
        self._eos_ids = eos_ids
        self._telemetry = telemetry
        self._clock = clock
        self._deltas: list[Delta] = []
        self._finished: list[Request] = []

    @property
    def pending(self) -> bool:
        """Whether there are deltas to take."""
        return bool(self._deltas)

    def take(self) -> list[Delta]:
        """The deltas since the last call."""
        deltas, self._deltas = self._deltas, []
        return deltas

    def take_finished(self) -> list[Request]:
        """The requests whose last answer has ended since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def stop_ids(self, params: SamplingParams) -> frozenset[int]:
        """Tokens that end an answer under these parameters."""
        own = frozenset(params.stop_token_ids)
        return own if params.ignore_eos else own | self._eos_ids

    def named(self, ranked: Sequence[RankedToken]) -> dict[int, Logprob]:
        """Ranked tokens with their texts."""
        return {
            r.token: Logprob(r.logprob, r.rank, self._tokenizer.decode([r.token], skip_special_tokens=False))
            for r in ranked
        }

    def append(self, answer: Answer, token: int, ranked: Sequence[RankedToken] | None, now: float) -> None:
        """Add a sampled token to an answer, and end it where a stop condition is met."""
        request, params = answer.request, answer.request.params
        self._telemetry.token(request, answer.token_times[-1] if answer.token_times else None, now)
        if request.first_token is None:
            request.first_token = now
        request.last_token = now
        answer.append(token, now)
        if ranked is not None:
            answer.cumulative_logprob += next(r.logprob for r in ranked if r.token == token)
            answer.logprobs.append(self.named(ranked))
        reached = len(answer.output_ids) >= params.min_tokens
        if reached and token in request.stop_ids:
            # The token is the mark of the end, not part of the text, unless the user wants to see it.
            shown = params.include_stop_str_in_output and token in params.stop_token_ids
            text = answer.text.push(token, may_stop=False)[0] if shown else ""
            answer.stop_reason = token if token in params.stop_token_ids else None
            self._end(answer, "stop", text, token)
            return
        text, stopped = answer.text.push(token, may_stop=reached)
        if stopped is not None:
            answer.stop_reason = stopped
            self._end(answer, "stop", text, token, flush=False)
        elif answer.num_tokens >= request.limit:
            self._end(answer, "length", text, token)
        else:
            self._emit(answer, text, token)

    def end_request(self, request: Request, reason: str) -> None:
        """End every answer of a request where it stands (`abort`, `error`)."""
        for answer in request.sequences:
            if answer.status is not Status.FINISHED:
                self._end(answer, reason, "", None)

    def _end(self, answer: Answer, reason: str, text: str, token: int | None, *, flush: bool = True) -> None:
        if flush:
            held, stopped = answer.text.finish()
            text += held
            if stopped is not None:
                reason, answer.stop_reason = "stop", stopped
        answer.finish_reason = reason
        self._scheduler.finish(answer)
        self._emit(answer, text, token)

    def _emit(self, answer: Answer, text: str, token: int | None) -> None:
        request = answer.request
        with_logprobs = request.params.logprobs is not None
        tells_prompt = token is not None and len(answer.output_ids) == 1 and not request.takes_hits
        if request.finished:
            self._finished.append(request)
            self._telemetry.ended(request, _reason(request), self._clock())
        self._deltas.append(
            Delta(
                request_id=request.request_id,
                index=answer.index,
                text=text,
                token_ids=[] if token is None else [token],
                logprobs=answer.logprobs[-1:] if with_logprobs and token is not None else None,
                finish_reason=answer.finish_reason,
                stop_reason=answer.stop_reason,
                prompt_logprobs=request.prompt_logprobs if tells_prompt else None,
                result=self._result(request) if request.finished else None,
            )
        )

    def _result(self, request: Request) -> RequestOutput:
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            prompt_logprobs=None if request.takes_hits else request.prompt_logprobs,
            outputs=[_completion(answer) for answer in request.sequences],
            usage=_usage(request),
            timings=_timings(request),
            error=request.error,
        )


def _reason(request: Request) -> str:
    """Why a request ended: as its answers did, or as the first of them that was cut off."""
    reasons = [answer.finish_reason or "abort" for answer in request.sequences]
    return next((reason for reason in reasons if reason in {"error", "abort"}), reasons[0])


def _completion(answer: Answer) -> CompletionOutput:
    with_logprobs = answer.request.params.logprobs is not None
    assert answer.finish_reason is not None
    return CompletionOutput(
        index=answer.index,
        text=answer.text.text,
        token_ids=answer.output_ids,
        cumulative_logprob=answer.cumulative_logprob if with_logprobs else None,
        logprobs=answer.logprobs if with_logprobs else None,
        finish_reason=answer.finish_reason,
        stop_reason=answer.stop_reason,
    )


def _usage(request: Request) -> Usage:
    return Usage(
        prompt_tokens=len(request.prompt_token_ids),
        completion_tokens=sum(len(answer.output_ids) for answer in request.sequences),
        cached_tokens=request.cached_by_source.total(),
        cached_by_source=dict(request.cached_by_source),
    )


def _timings(request: Request) -> Timings:
    """Times that did not come to pass (a request aborted in the queue) are zero."""
    times = request.sequences[0].token_times
    arrival = request.arrival
    return Timings(
        queue=(request.first_scheduled or arrival) - arrival,
        ttft=(request.first_token or arrival) - arrival,
        inter_token=tuple(b - a for a, b in pairwise(times)),
        total=(request.last_token or arrival) - arrival,
        preemptions=request.preemptions,
        loads=tuple(request.loads),
        recomputed={reason: tokens for reason, tokens in request.recomputed.items() if tokens},
        speculation=request.speculation,
    )
