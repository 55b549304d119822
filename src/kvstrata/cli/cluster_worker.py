"""An engine in a process of its own, told what to do by lines of JSON on stdin, and telling on stdout.

`python -m kvstrata.cli.cluster_worker` reads a first line with the settings of `EngineConfig` and answers
`{"ready": true, "pool_tokens": n}`. Then each line is a request and has one line of answer:

- `{"ask": [[token ids], ...], "at": seconds}`: answers with one token each, begun at that time of the
  monotonic clock, which all processes of a machine share;
- `{"chat": "text"}`: the prompt's token ids;
- `{"forget": true}`: empties the pool, not the tiers;
- `{"quit": true}`: ends, as the end of stdin does.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kvstrata.config import EngineConfig, SamplingParams
from kvstrata.errors import KVStrataError

if TYPE_CHECKING:
    from kvstrata.engine.llm import LLM


def main() -> None:
    """Serve the lines until `quit`, or the end of stdin."""
    try:
        from kvstrata.engine.llm import LLM  # noqa: PLC0415  (torch takes a second)

        llm = LLM(config=EngineConfig.from_mapping(json.loads(sys.stdin.readline())))
    except KVStrataError as error:
        _tell({"error": str(error)})
        return
    _tell({"ready": True, "pool_tokens": llm.engine.cache.capacity_tokens})
    with llm:
        for line in sys.stdin:
            request = json.loads(line)
            if "quit" in request:
                break
            _tell(_answer(llm, request))


def _answer(llm: LLM, request: dict[str, Any]) -> dict[str, Any]:
    if "chat" in request:
        text = llm.loaded.chat_template.render([{"role": "user", "content": request["chat"]}])
        return {"token_ids": llm.tokenizer.encode(text, parse_special=True)}
    if "forget" in request:
        llm.engine.drain()
        llm.engine.reset_cache()
        return {}
    return _ask(llm, request["ask"], request.get("at", 0.0))


def _ask(llm: LLM, prompts: list[list[int]], at: float) -> dict[str, Any]:
    """What answering took and where the tokens' K and V came from, in this process."""
    before = llm.engine.telemetry.prefill_tokens
    time.sleep(max(0.0, at - time.monotonic()))
    begin = time.monotonic()
    results = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
    end = time.monotonic()
    computed = llm.engine.telemetry.prefill_tokens - before
    llm.engine.drain()
    sources: dict[str, int] = {}
    for result in results:
        for name, tokens in result.usage.cached_by_source.items():
            sources[name] = sources.get(name, 0) + tokens
    tiering = llm.engine.tiering
    stats = None if tiering is None else tiering.stats()
    return {
        "computed_tokens": computed,
        "cached_by_source": sources,
        "loaded_blocks": sum(load.blocks for result in results for load in result.timings.loads),
        "ttft": [result.timings.ttft for result in results],
        "token_ids": [result.outputs[0].token_ids for result in results],
        "begin": begin,
        "end": end,
        "leases": None if stats is None or stats.leases is None else asdict(stats.leases),
        "tiers": {}
        if stats is None
        else {tier.name: {"stores": tier.usage.stores, "loads": tier.usage.loads} for tier in stats.tiers},
    }


def _tell(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
