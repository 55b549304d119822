"""Double releases, finishing in the step of a preemption, one-token answers: counts stay right."""

from toy import make_toy

from kvstrata import SamplingParams
from kvstrata.engine.request import Status


def test_the_same_sequence_released_twice_gives_its_blocks_back_once() -> None:
    toy = make_toy(blocks=8)
    toy.engine.add_request("x", [1, 2, 3, 4, 5, 6], SamplingParams(max_tokens=8, ignore_eos=True))
    toy.step()
    sequence = toy.engine.scheduler.running[0]
    held = sequence.cache
    assert held is not None
    toy.engine.scheduler.finish(sequence)
    toy.cache.release(held)
    toy.engine.scheduler.finish(sequence)
    toy.assert_idle()


def test_aborted_while_preempted_leaves_nothing_behind() -> None:
    toy = make_toy(blocks=8)
    toy.engine.add_request("x", [1, 2, 3, 4, 5, 6], SamplingParams(max_tokens=8, ignore_eos=True))
    toy.step()
    sequence = toy.engine.scheduler.running[0]
    toy.engine.scheduler.preempt(sequence)
    assert sequence.status is Status.WAITING
    assert toy.engine.abort("x")
    assert not toy.engine.abort("x")
    toy.step()
    assert not toy.engine.has_unfinished
    toy.assert_idle()


def test_a_request_may_finish_in_the_step_in_which_another_is_preempted_for_it() -> None:
    # Two sequences of 5 blocks at the end, in a pool of 7: the later one has to give way.
    toy = make_toy(blocks=7, block_size=4)
    for name in ("a", "b"):
        toy.engine.add_request(
            name,
            [ord(name) - 60, 2, 3, 4, 5, 6, 7],
            SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
        )
    results = toy.run()
    assert results["b"].timings.preemptions >= 1
    for name in ("a", "b"):
        solo = make_toy()
        solo.engine.add_request(
            name,
            [ord(name) - 60, 2, 3, 4, 5, 6, 7],
            SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
        )
        assert solo.run()[name].outputs[0].token_ids == results[name].outputs[0].token_ids
    toy.assert_idle()


def test_one_token_answers() -> None:
    toy = make_toy(blocks=6)
    for n in range(1, 30):
        toy.engine.add_request(
            str(n), list(range(1, 1 + n % 9 + 1)), SamplingParams(max_tokens=1, ignore_eos=True)
        )
    results = toy.run()
    assert all(len(r.outputs[0].token_ids) == 1 for r in results.values())
    assert all(r.outputs[0].finish_reason == "length" for r in results.values())
    toy.assert_idle()
