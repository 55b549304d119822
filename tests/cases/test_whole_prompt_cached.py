"""The whole prompt is cached: the last token is still computed, without writing into a shared block."""

import pytest
from toy import make_toy

from kvstrata import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.mark.parametrize("length", [4, 8, 12, 13])
def test_only_what_follows_the_last_shared_block_is_computed(length: int) -> None:
    toy = make_toy(block_size=4)
    prompt = list(range(1, length + 1))
    toy.engine.add_request("cold", prompt, GREEDY)
    cold = toy.run()["cold"]
    computed = toy.model.tokens_computed

    toy.engine.add_request("warm", prompt, GREEDY)
    warm = toy.run()["warm"]

    hit = (length - 1) // 4 * 4
    assert warm.outputs[0].token_ids == cold.outputs[0].token_ids
    assert warm.usage.cached_tokens == hit
    assert toy.model.tokens_computed - computed == length - hit + 5  # five of six answer tokens are fed back
    toy.assert_idle()


def test_no_slot_of_a_cached_block_is_written_again() -> None:
    toy = make_toy(block_size=4)
    prompt = list(range(1, 13))
    toy.engine.add_request("cold", prompt, GREEDY)
    toy.run()
    pool = toy.cache.pools[0].kv
    # The toy model wrote positions 0..11 of the prompt; spoil nothing, just remember what lies there.
    holders = [
        b for b in range(pool.shape[0]) if pool[b, 0, 1, 0, 0, 0] in (0, 4, 8) and pool[b, 0, 0, 0, 0, 0] > 0
    ]
    before = {block: pool[block].clone() for block in holders[:2]}

    toy.engine.add_request("a", prompt, GREEDY)
    toy.engine.add_request("b", prompt, GREEDY)
    toy.run()

    for block, content in before.items():
        assert pool[block].equal(content)
