"""Two salts over the same servers share nothing; one salt shares."""

from __future__ import annotations

from shared_store import GREEDY, PROMPTS, answers, toy_over
from valkey_servers import ValkeyServer

from kvstrata import RequestOptions


def test_salts_share_nothing_through_servers_and_one_salt_does(valkeys: list[ValkeyServer]) -> None:
    url = f"valkey://{','.join(server.name for server in valkeys)}"
    first, second = toy_over(url), toy_over(url)
    [right] = answers(first, PROMPTS[:1], RequestOptions(cache_salt="alice"))
    first.settle()

    def hits(salt: str) -> int:
        second.engine.reset_cache()
        second.engine.add_request(salt, PROMPTS[0], GREEDY, options=RequestOptions(cache_salt=salt))
        result = second.run(10_000_000)[salt]
        second.settle()
        assert result.outputs[0].token_ids == right
        return result.usage.cached_by_source.get("valkey", 0)

    assert hits("bob") == 0
    assert hits("") == 0
    assert hits("alice") == 68
    assert hits("bob") == 68, "by now its own are there"
    first.engine.close()
    second.engine.close()
