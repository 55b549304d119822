"""The log's lines, and that a log which cannot be written holds up nobody."""

from __future__ import annotations

import io
import json
import threading

import pytest

from kvstrata.server.request_log import RequestLog, as_json, as_logfmt


def test_both_forms_leave_out_what_is_unknown_and_stay_on_one_line():
    fields = {
        "id": "a b",
        "none": None,
        "status": 200,
        "cached": {"pool": 3},
        "text": 'say "hi"\nthere',
        "e": "",
    }
    assert json.loads(as_json(fields)) == {name: value for name, value in fields.items() if value is not None}
    assert as_logfmt(fields) == 'id="a b" status=200 cached.pool=3 text="say \\"hi\\"\\nthere" e=""'
    assert "\n" not in as_json(fields)


@pytest.mark.parametrize(("form", "first"), [("json", "{"), ("logfmt", "time=")])
def test_lines_are_written_in_order_before_it_closes(form, first):
    stream = io.StringIO()
    log = RequestLog(stream, form)
    for number in range(100):
        log.write("request", number=number)
    log.close()
    lines = stream.getvalue().splitlines()
    assert len(lines) == 100
    assert all(line.startswith(first) for line in lines)


def test_a_reader_that_is_stuck_costs_lines_and_not_time():
    stuck = threading.Event()

    class Pipe(io.StringIO):
        def write(self, text: str) -> int:
            stuck.wait()
            return 0

    log = RequestLog(Pipe(), "json")
    for number in range(20_000):
        log.write("request", number=number)
    assert log.dropped > 0
    stuck.set()


def test_a_closed_stream_is_survived():
    stream = io.StringIO()
    log = RequestLog(stream, "json")
    stream.close()
    log.write("request")
    log.close()
    assert log.dropped == 1
