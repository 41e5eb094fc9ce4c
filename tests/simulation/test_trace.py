"""Reading traces: both forms, and errors about invalid files."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tables import each_case

from daskserve.simulation.trace import TraceError, parse_trace, read_trace


def test_a_line_per_second() -> None:
    trace = parse_trace("timestamp_s,requests\n100,3\n101,0\n102,5.5\n")
    assert (list(trace.counts), trace.starts_at, trace.requests) == ([3, 0, 5.5], 100, 8.5)
    assert trace.mean_duration_s is None


def test_a_line_per_minute_is_spread_over_the_minute() -> None:
    trace = parse_trace("timestamp_s,requests\n0,60\n60,120\n180,60\n")
    assert len(trace.counts) == 240
    assert (trace.counts[59], trace.counts[60], trace.counts[120], trace.counts[239]) == (1, 2, 0, 1)


def test_a_line_per_request_in_any_order_with_durations() -> None:
    trace = parse_trace("duration_s, timestamp_s\n0.5,11.2\n1.5,10.9\n2.5,10.1\n0.5,13\n")
    assert list(trace.counts) == [2, 1, 0, 1]
    assert list(trace.durations_s) == [2.0, 0.5, 1.25, 0.5]
    assert trace.mean_duration_s == pytest.approx(1.25)
    assert trace.duration_cv == pytest.approx(0.6633, abs=1e-4)


@each_case(
    ("text", "message"),
    [
        ("", "has the columns none; make its first line timestamp_s,requests"),
        ("time,requests\n1,2\n", "has the columns time, requests"),
        ("timestamp_s,requests,user\n1,2,3\n", "has the columns timestamp_s, requests, user"),
        ("timestamp_s,requests\n", "no line below its header"),
        ("timestamp_s,requests\n1,2\n2\n", "line 3 does not have as many values"),
        ("timestamp_s,requests\n1,2,3\n", "line 2 does not have as many values"),
        ("timestamp_s,requests\n1,2\n2,many\n", "line 3: requests is 'many'; give a number"),
        ("timestamp_s\n2024-03-08\n", "timestamp_s is '2024-03-08'"),
        ("timestamp_s,requests\n1,nan\n", "requests is 'nan'"),
        ("timestamp_s,requests\ninf,1\n", "timestamp_s is 'inf'"),
        ("timestamp_s,requests\n1,-2\n", "can be negative"),
        ("timestamp_s,duration_s\n1,-2\n", "can be negative"),
        ("timestamp_s\n1\n1709856000000\n", "days; give timestamp_s in seconds"),
    ],
)
def test_an_invalid_trace_is_refused_with_line_and_value(text: str, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        parse_trace(text)


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"timestamp_s\n\x00\n", b"timestamp_s\n1\n\x80\n"])
def test_a_file_that_is_not_text_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(content)
    with pytest.raises(TraceError):
        read_trace(path)


def test_a_file_from_a_spreadsheet_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(b"\xef\xbb\xbftimestamp_s,requests\r\n1,2\r\n")
    assert list(read_trace(path).counts) == [2]


@given(st.text(alphabet="timestamp_s,requests\n0123456789.-\"'e ", max_size=60))
def test_any_text_is_a_trace_or_a_trace_error(text: str) -> None:
    try:
        parse_trace("timestamp_s,requests\n" + text)
    except TraceError:
        pass
