"""A retention that cannot be is refused once, in one line that says what would do."""

from __future__ import annotations

import pytest
from toy import make_toy

from kvstrata import SamplingParams
from kvstrata.cache.retention import FULL, Retention
from kvstrata.errors import ConfigError, RequestError

BAD = [
    "sinks:-1",
    "sinks:-1+16",
    "sinks:4",
    "sinks:4+0",
    "sinks:4+",
    "sinks:+16",
    "sinks:a+b",
    "window:0",
    "window:-5",
    "window:1.5",
    "window:1e3",
    "window:",
    "window",
    "window:99999999999",
    "sinks:99999999999+1",
    "sinks:٤+١٦",
    "windows:16",
    "",
    "none",
]


@pytest.mark.parametrize("text", BAD)
def test_it_is_refused_by_name_with_what_would_do(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Retention.parse(text, "kvstrata.retention")
    message = str(caught.value)
    assert message.startswith(f"kvstrata.retention is {text!r}; ")
    assert "sinks:4+1020" in message
    assert "\n" not in message


@pytest.mark.parametrize("value", [None, 5, 1.5, b"full", ["full"], True])
def test_what_is_no_text_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="retention is "):
        Retention.parse(value)
    if value is not None:
        with pytest.raises(ConfigError, match="retention is "):
            SamplingParams(retention=value)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["sinks:-1", "window:0", "bogus", "window:600"])
def test_the_engine_refuses_the_request_and_serves_others(text: str) -> None:
    toy = make_toy(max_model_len=512)
    with pytest.raises(RequestError, match="retention is "):
        toy.engine.add_request("bad", [1, 2, 3], SamplingParams(retention=text))
    toy.engine.add_request("good", [1, 2, 3], SamplingParams(retention="window:512"))
    assert toy.run()["good"].error is None


@pytest.mark.parametrize(
    ("text", "retention"),
    [
        ("full", FULL),
        (" window:1 ", Retention(0, 1)),
        ("window:3", Retention(0, 3)),  # smaller than a block
        ("sinks:0+16", Retention(0, 16)),
        ("sinks:4+1020", Retention(4, 1020)),
    ],
)
def test_what_is_right_is_taken(text: str, retention: Retention) -> None:
    assert Retention.parse(text) == retention
    assert Retention.parse(str(retention)) == retention


@pytest.mark.parametrize(("sinks", "window"), [(1, None), (0, 0), (-1, 5), (0, 2**31)])
def test_no_such_value_can_be_made(sinks: int, window: int | None) -> None:
    with pytest.raises(ConfigError, match="retention"):
        Retention(sinks, window)
