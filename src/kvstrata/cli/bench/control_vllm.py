"""The cached prompt of `kvstrata bench control`, served by vLLM's KVCacheManager.

Usage: python control_vllm.py TOKENS REPEATS, with a Python that has vLLM. kvstrata itself never imports this:
it runs it as a script, and reads the last line of its output.
"""

import inspect
import json
import random
import sys
import time
from importlib import import_module
from typing import Any

BLOCK = 16
PARTS = ("keys", "match", "allocate", "release")


def main() -> None:
    """Print one JSON object: `total_ms_TOKENS_cached` and `parts_ms`, the best of each part."""
    tokens, repeats = int(sys.argv[1]), int(sys.argv[2])
    manager, make_request = environment(tokens)
    prompt = random.Random(0).choices(range(49_152), k=tokens)
    serve(manager, make_request, prompt, 0)
    runs = [serve(manager, make_request, prompt, number) for number in range(1, repeats + 1)]
    parts = {part: min(run[part] for run in runs) for part in PARTS}
    print(json.dumps({f"total_ms_{tokens}_cached": sum(parts.values()), "parts_ms": parts}))


def environment(tokens: int) -> tuple[Any, Any]:
    """A manager of one full-attention group, and a function that makes a request and hashes its blocks."""
    # By name: kvstrata is checked without vLLM.
    hashing = import_module("vllm.utils.hashing")
    managers = import_module("vllm.v1.core.kv_cache_manager")
    utils = import_module("vllm.v1.core.kv_cache_utils")
    interface = import_module("vllm.v1.kv_cache_interface")
    requests = import_module("vllm.v1.request")
    params = import_module("vllm").SamplingParams(max_tokens=1)
    bfloat16 = import_module("torch").bfloat16

    utils.init_none_hash(hashing.sha256)
    hasher = utils.get_request_block_hasher(BLOCK, hashing.sha256)
    spec = interface.FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=16, dtype=bfloat16)
    config = interface.KVCacheConfig(
        num_blocks=2 * -(-tokens // BLOCK) + 1,
        kv_cache_tensors=[],
        kv_cache_groups=[interface.KVCacheGroupSpec(["layer"], spec)],
    )
    accepted = inspect.signature(managers.KVCacheManager.__init__).parameters
    wanted = {
        "max_model_len": 2 * tokens,
        "max_num_batched_tokens": tokens,
        "hash_block_size": BLOCK,
        "scheduler_block_size": BLOCK,
        "enable_caching": True,
    }
    known = {name: value for name, value in wanted.items() if name in accepted}
    manager = managers.KVCacheManager(config, **known)

    def make_request(prompt: list[int], number: int) -> Any:
        optional = {"eos_token_id": 0, "lora_request": None}
        accepted = inspect.signature(requests.Request.__init__).parameters
        return requests.Request(
            request_id=str(number),
            prompt_token_ids=prompt,
            sampling_params=params,
            pooling_params=None,
            block_hasher=hasher,
            **{name: value for name, value in optional.items() if name in accepted},
        )

    return manager, make_request


def serve(manager: Any, make_request: Any, prompt: list[int], number: int) -> dict[str, float]:
    """Milliseconds of each part."""
    marks = [time.perf_counter()]
    request = make_request(prompt, number)
    marks.append(time.perf_counter())
    blocks, hit, *_ = manager.get_computed_blocks(request)  # newer releases tell more
    marks.append(time.perf_counter())
    if manager.allocate_slots(request, len(prompt) - hit, hit, blocks) is None:
        raise RuntimeError("the pool is too small for the prompt")
    marks.append(time.perf_counter())
    request.num_computed_tokens = len(prompt)
    manager.free(request)
    marks.append(time.perf_counter())
    return {part: 1e3 * (marks[i + 1] - marks[i]) for i, part in enumerate(PARTS)}


if __name__ == "__main__":
    main()
