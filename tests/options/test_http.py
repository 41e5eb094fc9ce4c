"""Which HTTP options are shown, and to whom."""

from __future__ import annotations

from typing import Any

import pytest
from tables import each_case

import daskserve as serve
from daskserve.client.functions import instances as api
from daskserve.errors import ClusterUnreachableError
from daskserve.options.http import HTTPOptions

OPEN = {"host": "0.0.0.0", "port": 80}


@each_case(
    ("options", "beginnings"),
    [
        ({}, []),
        ({"host": "10.0.0.1"}, []),
        ({"debug": True}, ["debug=True shows tracebacks"]),
        (OPEN, ["host='0.0.0.0' accepts unencrypted requests"]),
        ({"host": "::"}, ["host='::' accepts unencrypted requests"]),
        ({**OPEN, "debug": True}, ["debug=True", "host='0.0.0.0'"]),
        ({**OPEN, "ssl_certfile": "cert.pem"}, []),
        ({**OPEN, "ssl_certfile": "cert.pem", "debug": True}, ["debug=True"]),
        ({**OPEN, "trusted_forwarders": ["10.0.0.0/8"]}, []),
        ({**OPEN, "debug": True, "location": "NoServer"}, []),
        ({"host": None, "debug": True}, []),
    ],
)
def test_options_that_reveal_something_are_risks(options: dict[str, Any], beginnings: list[str]) -> None:
    found = HTTPOptions(**options).risks()
    assert len(found) == len(beginnings)
    for text, beginning in zip(found, beginnings, strict=True):
        assert text.startswith(beginning)


def test_a_start_warns_of_them_in_the_line_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    async def find_none(*_: object) -> None:
        raise ClusterUnreachableError("none")

    monkeypatch.setattr(api, "find_connection", find_none)
    options = {**OPEN, "debug": True}
    with pytest.warns(UserWarning, match="debug=True|host=") as warned:
        with pytest.raises(ClusterUnreachableError):
            serve.start(http_options=options)
    risks = HTTPOptions(**options).risks()
    assert [(str(each.message), each.filename) for each in warned] == [(risk, __file__) for risk in risks]
