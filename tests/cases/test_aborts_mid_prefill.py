"""An abort in the middle of a prefill chunk, 200 times in a row: every block comes back."""

from toy import make_toy

from kvstrata import SamplingParams


def test_two_hundred_aborts_mid_prefill_lose_no_block() -> None:
    toy = make_toy(blocks=24, block_size=4, token_budget=7)
    for round_ in range(200):
        prompt = [1 + (round_ * 7 + i) % 90 for i in range(40 + round_ % 13)]
        toy.engine.add_request(f"r{round_}", prompt, SamplingParams(max_tokens=4))
        for _ in range(1 + round_ % 4):
            toy.step()
        assert toy.engine.abort(f"r{round_}")
        toy.step()
        toy.assert_idle()
    assert not toy.engine.has_unfinished
    toy.engine.add_request("last", list(range(1, 60)), SamplingParams(max_tokens=4, ignore_eos=True))
    assert len(toy.run()["last"].outputs[0].token_ids) == 4


def test_a_follower_goes_on_alone_when_its_leader_is_aborted() -> None:
    toy = make_toy(blocks=64, token_budget=6)
    prompt = list(range(1, 40))
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    toy.engine.add_request("leader", prompt, params)
    toy.step()
    toy.engine.add_request("follower", prompt, params)
    toy.step()
    toy.engine.abort("leader")
    result = toy.run()["follower"]
    solo = make_toy()
    solo.engine.add_request("follower", prompt, params)
    assert result.outputs[0].token_ids == solo.run()["follower"].outputs[0].token_ids
    toy.assert_idle()
