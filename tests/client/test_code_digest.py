"""The digest of pickled code: equal for equal code, and different for any other."""

from __future__ import annotations

import pickle
from typing import Any

from tables import each_case

from daskserve.client.definitions.code_digest import DIGITS, READ_BYTES, code_digest


def digest(value: Any, **options: Any) -> str:
    return code_digest((pickle.dumps(value, protocol=5),), **options)


def copy_of(text: str) -> str:
    return "".join(list(text))


@each_case("size", [3, 300])
def test_references_to_texts_are_the_texts(size: int) -> None:
    text = "x" * size
    assert digest([text, text, text]) == digest([text, copy_of(text), text])
    assert digest([text, text]) != digest([text, "y" * size])
    assert digest({text: 1, "b": text}) != digest({text: 1, "b": "b"})


def test_references_beyond_the_first_hundreds_are_followed() -> None:
    texts = [f"text {number}" for number in range(600)]
    assert digest(texts + texts) == digest(texts + [copy_of(each) for each in texts])
    objects: list[Any] = [[] for _ in range(600)]
    assert digest([*objects, objects[400]]) != digest([*objects, objects[401]])


@each_case("items", [["a", "bb", b"c"], [1, 300, -5, 2**70, 1.5, None, True]])
def test_the_order_within_a_set_does_not_matter(items: list[Any]) -> None:
    def pickled(order: list[Any]) -> bytes:
        # Two processes may write the set differently: both write a mark, the items, and the opcode that adds
        # them.
        items = (pickle.dumps(each, protocol=5)[:-1] for each in order)
        content = b"".join(each[11:] if each[2:3] == b"\x95" else each[2:] for each in items)
        return b"\x80\x05\x8f\x94(" + content + b"\x90."

    assert pickle.loads(pickled(items)) == set(items)
    assert code_digest((pickled(items),)) == code_digest((pickled(items[::-1]),))
    assert code_digest((pickled(items),)) != code_digest((pickled(items[1:]),))


def test_the_order_within_a_list_matters() -> None:
    assert digest([["a", "b"]]) != digest([["b", "a"]])
    assert digest([frozenset({"a"}), "b"]) != digest([frozenset({"b"}), "a"])


def test_a_text_cannot_pass_for_other_instructions() -> None:
    assert digest(["a", "b"]) != digest(["a\x8c\x01b"])
    assert digest("0\n") != digest([])


@each_case("text", ["model:{}", "model:{}:list"])
def test_addresses_of_classes_are_their_names(text: str) -> None:
    class Model: ...

    with_id = text.format(id(Model))
    assert digest([with_id], classes=[Model]) != digest([with_id])
    assert digest([with_id], classes=[Model]) != digest([text.format("1234567")], classes=[Model])


def test_addresses_of_the_arguments_of_generic_models_do_not_matter() -> None:
    class Page: ...

    def of(argument: str) -> str:
        return digest([f"shop.Page:{id(Page)}[{argument}]"], classes=[Page])

    assert of("int:1234567") == of("int:2345678")
    assert of("int:1234567") != of("str:1234567")
    assert of("list[int]:1234567") == of("list[int]:2345678")
    assert digest(["shop:1234567"], classes=[Page]) != digest(["shop:2345678"], classes=[Page])


def test_aliases_stand_for_texts() -> None:
    assert digest(["abc", "other"], aliases={"abc": "0"}) == digest(["xyz", "other"], aliases={"xyz": "0"})
    assert digest(["abc"], aliases={"abc": "0"}) != digest(["abc"], aliases={"abc": "1"})


def test_buffers_and_large_pickles_count() -> None:
    small = pickle.dumps(1, protocol=5)
    assert code_digest((small, b"a")) != code_digest((small, b"b")) != code_digest((small,))
    large = bytes(READ_BYTES)
    assert digest(large) != digest(large[:-1] + b"1")
    assert len(digest(large)) == DIGITS
