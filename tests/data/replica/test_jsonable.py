"""Results as JSON: which types are written, and how."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import json
import math
import sys
import types
import uuid
from collections import OrderedDict, deque
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import pydantic
import pytest
from tables import case

from daskserve.data.replica.user_code.json import to_json
from daskserve.errors import UserCodeError


class Color(enum.Enum):
    RED = "red"


class Rank(enum.IntEnum):
    SECOND = 2


@dataclasses.dataclass
class Price:
    amount: decimal.Decimal


class Model(pydantic.BaseModel):
    score: float
    price: decimal.Decimal


class Opaque:
    pass


def test_values_that_json_does_not_know() -> None:
    for value, expected in [
        (datetime.datetime(2020, 1, 2, 3, 4, 5), "2020-01-02T03:04:05"),
        (datetime.time(3, 4), "03:04:00"),
        (datetime.timedelta(minutes=1), 60.0),
        (uuid.UUID(int=1), "00000000-0000-0000-0000-000000000001"),
        (datetime.datetime(2020, 1, 2, tzinfo=datetime.UTC), "2020-01-02T00:00:00+00:00"),
        (decimal.Decimal("1.5"), 1.5),
        (Price(decimal.Decimal("1.5")), {"amount": 1.5}),
        (Rank.SECOND, 2),
        (np.float64(0.5), 0.5),
        (deque([{1}, (2, 3)]), [[1], [2, 3]]),
        (Color.RED, "red"),
        (PurePosixPath("/a/b"), "/a/b"),
        (b"text", "text"),
        ({3}, [3]),
        ({"k": 1}.keys(), ["k"]),
        ({None: 1, True: 2, 1.5: 3, Rank.SECOND: 4}, {"null": 1, "true": 2, "1.5": 3, "2": 4}),
        (types.MappingProxyType({"k": 1}), {"k": 1}),
        (OrderedDict(k=np.int64(1)), {"k": 1}),
        ({np.int64(1): "one", uuid.UUID(int=1): {Color.RED: 2}}, None),
    ]:
        with case(value, expected):
            if expected is None:
                expected = {"1": "one", "00000000-0000-0000-0000-000000000001": {"red": 2}}
            assert json.loads(to_json(value)) == expected
            assert json.loads(to_json({"nested": [value]})) == {"nested": [expected]}


def test_pandas_is_recognised_where_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    class DataFrame:
        def to_dict(self, orient: str) -> list[dict[str, int]]:
            assert orient == "records"
            return [{"a": 1}]

    class Series:
        def tolist(self) -> list[int]:
            return [1, 2]

    class NaTType(datetime.datetime):
        pass

    missing = NaTType(1, 1, 1)
    pandas: Any = types.SimpleNamespace(DataFrame=DataFrame, Series=Series, NaT=missing, NA=object())
    monkeypatch.setitem(sys.modules, "pandas", pandas)
    assert to_json({"frame": DataFrame(), "series": Series()}) == b'{"frame":[{"a":1}],"series":[1,2]}'
    assert to_json([pandas.NaT, pandas.NA]) == b"[null,null]"


def test_no_library_is_imported_to_check_for_its_types(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("numpy", "pandas", "pydantic"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(UserCodeError):
        to_json(Opaque())
    assert not {"numpy", "pandas", "pydantic"} & set(sys.modules)


def test_a_model_is_written_by_its_own_serializer() -> None:
    model = Model(score=math.nan, price=decimal.Decimal("1.5"))
    assert to_json([model]) == b"[" + model.model_dump_json().encode() + b"]"


def test_numbers_that_json_does_not_have_are_null() -> None:
    for value in [
        math.nan,
        -math.inf,
        np.float32("nan"),
        np.longdouble("inf"),
        np.datetime64("NaT", "s"),
        decimal.Decimal("NaN"),
        Model(score=math.nan, price=decimal.Decimal("1")).score,
    ]:
        with case(value):
            assert to_json({"deep": [value, (value,)]}) == b'{"deep":[null,[null]]}'
            assert to_json(np.array([[value]])) == b"[[null]]"


def test_keys_that_are_no_numbers_stay_apart() -> None:
    assert to_json({math.nan: 1, math.inf: 2, np.datetime64("NaT", "s"): 3}) == b'{"nan":1,"inf":2,"NaT":3}'


def test_a_value_that_has_no_json_is_an_error() -> None:
    for value in [Opaque(), {(1, 2): 3}, 1j, np.array([1j]), range(3), Opaque, b"\xff", "\ud800"]:
        with case(value):
            with pytest.raises(UserCodeError, match="cannot be written as JSON"):
                to_json({"deep": [value]})
