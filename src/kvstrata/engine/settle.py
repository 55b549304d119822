"""What a step's logits settle: blocks are published, tokens sampled, proposed tokens accepted or not.

A token that was proposed (Leviathan, Kalman and Matias, arXiv 2211.17192) never takes the place of the draw
of the target model: each place's token is drawn from the target's logits by the same function, with the same
random number, as without proposals. What was proposed only decides whether the row after it is of use: it is
if, and only if, the draw gave that very token. So answers are the same with and without, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from kvstrata.engine.delivery import Delivery
from kvstrata.engine.request import Request, Status
from kvstrata.engine.request import Sequence as Answer
from kvstrata.engine.runner import StepLogits, wants_all_logits
from kvstrata.engine.sampler import SampleInput, is_adjusted, rank_tokens, sample
from kvstrata.engine.scheduler import Scheduler
from kvstrata.engine.text import AnswerText
from kvstrata.engine.work import Work
from kvstrata.models.tokenizer import Tokenizer

_argmax: Final = torch.ops.kvstrata.argmax.default
_finite_rows: Final = torch.ops.kvstrata.finite_rows.default


@dataclass(frozen=True)
class Verdict:
    """What became of a work's proposed tokens: so many were right, of so many that were compared."""

    accepted: int = 0
    judged: int = 0


class Settler:
    """Turns the logits of a step's works into tokens of their answers, in the works' order."""

    def __init__(
        self, tokenizer: Tokenizer, scheduler: Scheduler, delivery: Delivery, clock: Callable[[], float]
    ) -> None:
        self._tokenizer = tokenizer
        self._scheduler = scheduler
        self._delivery = delivery
        self._clock = clock

    def settle(self, works: Sequence[Work], step: StepLogits) -> list[Verdict]:
        """Publish what was computed, sample where a token is due, and end what is finished."""
        finite: list[bool] = _finite_rows(step.logits).tolist()
        sampling: list[tuple[Answer, int]] = []
        for work, rows in zip(works, step.rows, strict=True):
            known = rows[: len(rows) - len(work.draft)]
            if not all(finite[row] for row in known):
                self._fail(work.sequence.request)
                continue
            if work.sequence.status is not Status.RUNNING:
                continue  # a sibling answer failed just now
            if wants_all_logits(work):
                self._note_prompt_logprobs(work, step.logits[rows.start : rows.stop])
            self._scheduler.computed(work)
            if work.samples:
                answers = [work.sequence, *self._fork_answers(work.sequence)]
                sampling.extend((answer, known[-1]) for answer in answers)
        sampling = [(answer, row) for answer, row in sampling if answer.status is Status.RUNNING]
        if sampling:
            picked = [row for _, row in sampling]
            whole = picked == list(range(len(finite)))
            self._sample([a for a, _ in sampling], step.logits if whole else step.logits[picked])
        if not any(work.draft for work in works):
            return [Verdict()] * len(works)
        likeliest: list[int] = _argmax(step.logits).tolist()
        return [
            self._verify(work, rows, step.logits, finite, likeliest)
            for work, rows in zip(works, step.rows, strict=True)
        ]

    def _verify(
        self, work: Work, rows: range, logits: Tensor, finite: Sequence[bool], likeliest: Sequence[int]
    ) -> Verdict:
        """Go on with the rows after a work's proposed tokens for as long as these turn out right.

        finite, likeliest: of each row, whether its logits are finite, and the first of its largest.
        """
        answer, accepted, judged = work.sequence, 0, 0
        if answer.request.error is not None:
            return Verdict()
        for token, row in zip(work.draft, rows[len(rows) - len(work.draft) :], strict=True):
            judged += 1
            if answer.output_ids[-1] != token:
                break
            accepted += 1
            if answer.status is not Status.RUNNING:
                break  # that token was its last
            if not finite[row]:
                self._fail(answer.request)
                break
            self._scheduler.accepted(answer)
            item = sample_input(answer)
            own = logits[row : row + 1]
            plain = item.params.greedy and not is_adjusted(item)
            self._deliver(answer, likeliest[row] if plain else sample(own, [item])[0], own, self._clock())
        if work.draft and answer.status is Status.RUNNING:
            self._scheduler.roll_back(answer)
        return Verdict(accepted, judged)

    def _fail(self, request: Request) -> None:
        request.error = "the model's output is not finite; what the request computed was not kept"
        self._delivery.end_request(request, "error")

    def _fork_answers(self, first: Answer) -> list[Answer]:
        """The other answers of a request start from the prompt that the first has computed."""
        request = first.request
        children = []
        for index in range(len(request.sequences), request.params.n):
            child = Answer(request, index, first.chain, AnswerText(self._tokenizer, request.params))
            self._scheduler.fork(first, child)
            request.sequences.append(child)
            children.append(child)
        return children

    def _sample(self, answers: Sequence[Answer], logits: Tensor) -> None:
        tokens = sample(logits, [sample_input(answer) for answer in answers])
        now = self._clock()
        for row, (answer, token) in enumerate(zip(answers, tokens, strict=True)):
            self._deliver(answer, token, logits[row : row + 1], now)

    def _deliver(self, answer: Answer, token: int, logits: Tensor, now: float) -> None:
        """Give an answer its token. logits: `[1, vocab_size]`, those that it was drawn from."""
        top = answer.request.params.logprobs
        ranked = None if top is None else rank_tokens(logits, [token], top)[0]
        self._delivery.append(answer, token, ranked, now)

    def _note_prompt_logprobs(self, work: Work, rows: Tensor) -> None:
        """Row i of the work tells about the token at start + i + 1; the first token has no prediction."""
        request = work.sequence.request
        known = request.prompt_logprobs
        if not known:
            known.append(None)
        # After a preemption midway the prompt is computed again; what is known already is not noted twice.
        first = len(known)
        last = min(work.start + work.count, len(request.prompt_token_ids) - 1)
        if first <= last:
            part = rows[first - 1 - work.start : last - work.start]
            top = request.params.prompt_logprobs or 0
            ranked = rank_tokens(part, request.prompt_token_ids[first : last + 1], top)
            known.extend(self._delivery.named(r) for r in ranked)


def sample_input(answer: Answer) -> SampleInput:
    """What the draw of an answer's next token depends on besides logits."""
    request = answer.request
    return SampleInput(
        params=request.params,
        prompt_ids=request.prompt_token_ids,
        output_ids=answer.output_ids,
        seed=request.seed,
        answer_index=answer.index,
        stop_ids=request.stop_ids,
    )
