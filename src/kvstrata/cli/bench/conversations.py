"""Conversations on record, replayed turn by turn: how much of what can be cached is, and its worth."""

from __future__ import annotations

import gzip
import hashlib
import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from kvstrata.cli.bench.load_client import Outcome, ask
from kvstrata.cli.bench.load_figures import milliseconds
from kvstrata.cli.remote import Remote, RemoteError
from kvstrata.errors import ConfigError

if TYPE_CHECKING:
    from kvstrata.models.chat import ChatTemplate
    from kvstrata.models.tokenizer import Tokenizer

Message = dict[str, str]
_PATH = "/v1/chat/completions"
_AT_ONCE = 1e-3  # seconds


@dataclass(frozen=True)
class Turn:
    """A request of a conversation: what was said before the model's turn, and that as tokens."""

    messages: Sequence[Message]
    tokens: Sequence[int]


def read_conversations(path: Path, count: int) -> list[list[Message]]:
    """The first `count` conversations of a file of tau-bench trajectories (JSON, gzipped or not).

    Calls of tools become text, and their results what the user says, since not every model's template has
    them. Raises ConfigError.
    """
    try:
        raw = path.read_bytes()
        rows = json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)
        return [[_message(each) for each in row["traj"]] for row in rows[:count]]
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--conversations is {str(path)!r}, which cannot be read ({error}); "
            "give JSON, a list of objects with a list of messages under 'traj'"
        ) from None


def _message(message: dict[str, Any]) -> Message:
    role = "user" if message["role"] == "tool" else message["role"]
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    text = message.get("content") or ""
    return {"role": role, "content": text + "".join(f"\n{c['name']}({c['arguments']})" for c in calls)}


def turns_of(
    conversation: Sequence[Message], template: ChatTemplate, tokenizer: Tokenizer, longest: int
) -> list[Turn]:
    """A request for each turn of the model, as long as prompts have at most `longest` tokens."""
    turns = []
    for place, message in enumerate(conversation):
        if message["role"] != "assistant" or place == 0:
            continue
        before = conversation[:place]
        tokens = tokenizer.encode(template.render(before), parse_special=True)
        if len(tokens) > longest:
            break
        turns.append(Turn(before, tokens))
    return turns


def unlimited_hits(prompts: Sequence[Sequence[int]], block_size: int) -> int:
    """Prompt tokens that a cache without limit would have, of prompts that come one after another.

    Whole blocks that an earlier prompt began with; the last token is always computed.
    """
    known: set[bytes] = set()
    hits = 0
    for prompt in prompts:
        key, found = b"", True
        for start in range(0, len(prompt) - block_size + 1, block_size):
            block = json.dumps(list(prompt[start : start + block_size])).encode()
            key = hashlib.sha256(key + block).digest()
            found = found and key in known and start + block_size < len(prompt)
            hits += block_size if found else 0
            known.add(key)
    return hits


def spread(count: int, of: int) -> list[int]:
    """`count` places among `of`, evenly spread; all of them where there are not so many."""
    return [place * of // count for place in range(count)] if count < of else list(range(of))


async def replay(
    server: Remote,
    conversations: Sequence[Sequence[Turn]],
    *,
    cold: int,
    block_size: int,
    max_tokens: int,
    timeout: float,
    advance: Callable[[str], None],
) -> dict[str, Any]:
    """Ask all turns one after another, and `cold` of them once more where nothing can be found.

    Those are asked right before or right after they have their turn, by turns, so that a machine whose speed
    drifts is as fair to one as to the other. Raises RemoteError where the server does not answer, or has
    other tokens.
    """
    turns = [turn for turns in conversations for turn in turns]
    run = uuid.uuid4().hex  # so that nothing of an earlier run is found

    async def asked(name: str, turn: Turn, salt: str, **more: Any) -> Outcome:
        outcome = await _ask(server, turn, {"max_tokens": max_tokens, "cache_salt": salt, **more}, timeout)
        advance(name)
        return outcome

    async def asked_cold(place: int) -> Outcome:
        # Gone at once, so that it leaves the others their room in the pool.
        return await asked("cold", turns[place], f"cold-{place}-{run}", kvstrata={"ttl": _AT_ONCE})

    timed = {place: number % 2 == 0 for number, place in enumerate(spread(cold, len(turns)))}
    without: dict[int, Outcome] = {}
    seen: list[Outcome] = []
    for place, turn in enumerate(turns):
        if timed.get(place) is True:
            without[place] = await asked_cold(place)
        seen.append(await asked("replay", turn, f"warm-{run}"))
        if timed.get(place) is False:
            without[place] = await asked_cold(place)
    prompt_tokens = sum(each.prompt_tokens for each in seen)
    share = sum(each.cached_tokens for each in seen) / prompt_tokens
    possible = unlimited_hits([turn.tokens for turn in turns], block_size) / prompt_tokens
    return {
        "conversations": len(conversations),
        "requests": len(turns),
        "prompt_tokens": prompt_tokens,
        "cached_share": share,
        "unlimited_share": possible,
        "of_unlimited": share / possible if possible else None,
        "ttft_ms": milliseconds(each.ttft for each in seen if each.ttft is not None),
        **compared([(seen[place], outcome) for place, outcome in without.items()]),
    }


def compared(pairs: Sequence[tuple[Outcome, Outcome]]) -> dict[str, Any]:
    """Times to the first token of the same requests, warm and cold, and their ratios request by request."""
    times = [
        (warm.ttft, cold.ttft) for warm, cold in pairs if warm.ttft is not None and cold.ttft is not None
    ]
    warm_ms = milliseconds(warm for warm, _ in times)
    cold_ms = milliseconds(cold for _, cold in times)
    ratios = [warm / cold for warm, cold in times]
    return {
        "cold_requests": len(times),
        "cold_cached_tokens": sum(cold.cached_tokens for _, cold in pairs),
        "cold_ttft_ms": cold_ms,
        "warm_ttft_ms": warm_ms,
        "ttft_cold_p50_ms": cold_ms and cold_ms["p50"],
        "ttft_warm_p50_ms": warm_ms and warm_ms["p50"],
        "ttft_p50_of_cold": warm_ms["p50"] / cold_ms["p50"] if warm_ms and cold_ms else None,
        "ttft_of_cold_paired": {"p50": median(ratios), "max": max(ratios)} if ratios else None,
    }


async def _ask(server: Remote, turn: Turn, fields: Mapping[str, Any], timeout: float) -> Outcome:
    body = {"messages": list(turn.messages), "temperature": 0, "ignore_eos": True, **fields}
    outcome = await ask(server, _PATH, body, timeout)
    if outcome.error is not None:
        raise RemoteError(f"a request of {len(turn.tokens)} tokens failed: {outcome.error}")
    if outcome.prompt_tokens != len(turn.tokens):
        raise RemoteError(
            f"the server counts {outcome.prompt_tokens} tokens where --model gives {len(turn.tokens)}; "
            "give the model that it serves"
        )
    return outcome
