"""An engine that speculates beside one that does not: the same prompts, in turns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvstrata.cli.bench.spec_prompts import Task
from kvstrata.config import SamplingParams

if TYPE_CHECKING:
    from kvstrata.engine.llm import LLM
    from kvstrata.engine.outputs import RequestOutput

LOOP_LENGTH, LOOP_TIMES = 8, 4
_SLACK = 16  # tokens beyond what an answer is likely to have


@dataclass
class Comparison:
    """Sums over prompts. left_out: prompts whose answer is a loop. identical: all answers had the same ids.

    plain, ahead: seconds from the first token of an answer to its last, without and with speculation.
    """

    prompts: int = 0
    tokens: int = 0
    left_out: int = 0
    plain: float = 0.0
    ahead: float = 0.0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    identical: bool = True
    by_prompt: list[float] = field(default_factory=list)

    def figures(self, name: str) -> dict[str, Any]:
        """Everything under names that begin with `name`."""
        return {
            f"{name}_speedup": self.plain / self.ahead if self.ahead else None,
            f"{name}_prompts": self.prompts,
            f"{name}_tokens": self.tokens,
            f"{name}_left_out": self.left_out,
            f"{name}_plain_tok_s": self.tokens / self.plain if self.plain else None,
            f"{name}_tok_s": self.tokens / self.ahead if self.ahead else None,
            f"{name}_draft_tokens": self.draft_tokens,
            f"{name}_acceptance": self.accepted_tokens / self.draft_tokens if self.draft_tokens else None,
            f"{name}_slowest": min(self.by_prompt, default=None),
            f"{name}_identical": self.identical,
        }


def compare(
    plain: LLM,
    ahead: LLM,
    tasks: Sequence[Task],
    *,
    max_tokens: int,
    repeats: int,
    advance: Callable[[], None],
) -> Comparison:
    """Answer each task on both, greedy, first on one and then on the other in turns; the best run counts."""
    total = Comparison()
    for llm in (plain, ahead):
        llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=16))  # warm-up
    for number, task in enumerate(tasks):
        runs: dict[int, list[RequestOutput]] = {id(plain): [], id(ahead): []}
        order = (plain, ahead) if number % 2 == 0 else (ahead, plain)
        for _ in range(repeats):
            for llm in order:
                runs[id(llm)].append(_answer(llm, task, max_tokens))
        _add(total, runs[id(plain)], runs[id(ahead)])
        advance()
    return total


def _answer(llm: LLM, task: Task, max_tokens: int) -> RequestOutput:
    if task.likely is not None:
        max_tokens = min(max_tokens, len(llm.tokenizer.encode(task.likely)) + _SLACK)
    params = SamplingParams(temperature=0, max_tokens=max_tokens, stop=task.stop)
    if task.chat and llm.loaded.chat_template.available:
        return llm.chat([{"role": "user", "content": task.text}], params)[0]
    return llm.generate(task.text, params)[0]


def _add(total: Comparison, plain: Sequence[RequestOutput], ahead: Sequence[RequestOutput]) -> None:
    ids = plain[0].outputs[0].token_ids
    if len(ids) < 2:
        return
    total.identical &= all(run.outputs[0].token_ids == ids for run in (*plain, *ahead))
    if loops(ids):
        total.left_out += 1
        return
    seconds = [min(sum(run.timings.inter_token) for run in runs) for runs in (plain, ahead)]
    # Where ids differ (dense weights, near-ties), an answer may be longer: time counts by the token.
    seconds[1] *= (len(ids) - 1) / max(1, len(ahead[0].outputs[0].token_ids) - 1)
    total.prompts += 1
    total.tokens += len(ids) - 1
    total.plain += seconds[0]
    total.ahead += seconds[1]
    total.by_prompt.append(seconds[0] / seconds[1])
    for run in ahead:
        total.draft_tokens += run.timings.speculation.draft_tokens
        total.accepted_tokens += run.timings.speculation.accepted_tokens


def loops(ids: Sequence[int]) -> bool:
    """Whether an answer goes round: an 8-gram in it comes four times."""
    grams = Counter(tuple(ids[at : at + LOOP_LENGTH]) for at in range(len(ids) - LOOP_LENGTH + 1))
    return max(grams.values(), default=0) >= LOOP_TIMES
