"""What is no URL of a tier is told as such, whatever it is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata import LLM
from kvstrata.errors import ConfigError
from kvstrata.tiers.arena import SlotArena
from kvstrata.tiers.secret import signing_key
from kvstrata.tiers.url import parse_tier_url

_PIECES = st.sampled_from(
    ["ram", "disk", "://", "/", "[", "]", "%00", "%", "?", "size=1", "&", "#", ":", "@", "::1"]
)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ram",
        "://",
        "disk://[x",
        "disk://x]/a",
        "disk:///a%00b?size=1GiB",
        "disk:///a\0b",
        "disk:///a#b?size=1",
    ],
)
def test_what_is_no_url_is_refused_by_name(text: str):
    with pytest.raises(ConfigError, match="tier "):
        parse_tier_url(text)


@given(st.lists(_PIECES | st.text(max_size=3), max_size=12).map("".join))
def test_any_text_is_a_url_or_refused(text: str):
    try:
        url = parse_tier_url(text)
    except ConfigError:
        return
    assert "\0" not in url.path


def test_a_number_sign_in_a_folder_can_be_written():
    assert parse_tier_url("disk:///a%23b?size=1").path == "/a#b"


@pytest.mark.parametrize(
    "source", ["file:a\0b", "file:/no/such/file", "file:/", "env:\0", "env:", "file:", "x"]
)
def test_a_signing_key_that_cannot_be_had_is_told(source: str):
    with pytest.raises(ConfigError, match="hmac"):
        signing_key(source)


@pytest.mark.parametrize(
    "text",
    [
        "ram://?size=0",
        "ram://?policy=best",
        "ram://?ttl=soon",
        "ram://place?size=1GiB",
        "ram://?sync=none",
        "disk:///a",
        "disk:///a?size=much",
        "disk:///a?size=1GiB&sync=now",
        "disk:///a?size=1GiB&ro=yes",
        "tape:///a",
    ],
)
def test_a_wrong_option_shows_before_a_model_is_loaded(text: str):
    with pytest.raises(ConfigError):
        LLM("/no/such/model.gguf", tiers=(text,))


def test_a_size_that_the_system_does_not_give_is_told_in_the_tiers_words():
    with pytest.raises(ConfigError, match="size of tier ram asks for"):
        SlotArena((4096,), 1 << 62, "size of tier ram")
