"""Conversations on record, replayed turn by turn: how much of what can be cached is, and its worth."""

from __future__ import annotations

import gzip
import hashlib
import json
import uuid
from collections.abc import Callable, Sequence
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
    """Ask all turns one after another, and before that `cold` of them where nothing can be found.

    Raises RemoteError where the server does not answer, or has other tokens.
    """
    turns = [turn for turns in conversations for turn in turns]
    sample = turns[:: max(1, len(turns) // cold)][:cold]

    async def asked(turn: Turn, salt: str) -> Outcome:
        body = {
            "messages": list(turn.messages),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "cache_salt": salt,
        }
        outcome = await ask(server, _PATH, body, timeout)
        if outcome.error is not None:
            raise RemoteError(f"a request of {len(turn.tokens)} tokens failed: {outcome.error}")
        if outcome.prompt_tokens != len(turn.tokens):
            raise RemoteError(
                f"the server counts {outcome.prompt_tokens} tokens where --model gives {len(turn.tokens)}; "
                "give the model that it serves"
            )
        return outcome

    run = uuid.uuid4().hex  # so that nothing of an earlier run is found
    without, seen = [], []
    for number, turn in enumerate(sample):
        without.append(await asked(turn, f"cold-{number}-{run}"))
        advance("cold")
    for turn in turns:
        seen.append(await asked(turn, f"warm-{run}"))
        advance("replay")
    prompt_tokens = sum(each.prompt_tokens for each in seen)
    share = sum(each.cached_tokens for each in seen) / prompt_tokens
    possible = unlimited_hits([turn.tokens for turn in turns], block_size) / prompt_tokens
    ttfts = [[each.ttft for each in runs if each.ttft is not None] for runs in (seen, without)]
    return {
        "conversations": len(conversations),
        "requests": len(turns),
        "prompt_tokens": prompt_tokens,
        "cached_share": share,
        "unlimited_share": possible,
        "of_unlimited": share / possible if possible else None,
        "ttft_ms": milliseconds(ttfts[0]),
        "cold_requests": len(without),
        "cold_ttft_ms": milliseconds(ttfts[1]),
        "ttft_p50_of_cold": median(ttfts[0]) / median(ttfts[1]) if all(ttfts) else None,
    }
