"""The digits example without a cluster: the model, the answers of the class, the checks of the demo."""

from __future__ import annotations

import asyncio
import http.server
import io
import json
import struct
import subprocess
import sys
import threading
import zlib
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
from PIL import Image
from starlette.requests import Request
from tables import each_case

from daskserve.testing import local_instance

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "digits"
sys.path.insert(0, str(EXAMPLE))

import app  # noqa: E402 - the example's folder must be in the path first
import model  # noqa: E402

BOUNDARY = "frontier"
FORM = f"multipart/form-data; boundary={BOUNDARY}"
CURL = "application/x-www-form-urlencoded"


@pytest.fixture(scope="module")
def split() -> model.Split:
    return model.load_split()


@pytest.fixture(scope="module")
def digits() -> app.Digits:
    return app.Digits()


def post(
    digits: app.Digits, body: bytes, content_type: str = CURL, chunk_size: int = 1 << 16
) -> tuple[int, Any]:
    """Call the class with one request, as a replica does; return the status and the decoded answer."""
    chunks = [body[i : i + chunk_size] for i in range(0, len(body), chunk_size)] or [b""]
    messages = [{"type": "http.request", "body": chunk, "more_body": True} for chunk in chunks]
    messages[-1]["more_body"] = False

    async def receive() -> dict[str, Any]:
        return messages.pop(0)

    headers = [(b"content-type", content_type.encode())]
    scope = {"type": "http", "method": "POST", "path": "/digits", "query_string": b"", "headers": headers}
    response = asyncio.run(digits(Request(scope, receive)))
    assert response.media_type == "application/json"
    return response.status_code, json.loads(response.body)


def form(*files: bytes, filename: str = 'filename="a.png"') -> bytes:
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="image"; {filename}\r\n\r\n'.encode()
    return b"".join(head + data + b"\r\n" for data in files) + f"--{BOUNDARY}--\r\n".encode()


def png(pixels: Any, mode: str | None = None) -> bytes:
    image = Image.fromarray(np.asarray(pixels, dtype=np.uint8), mode=None)
    stream = io.BytesIO()
    (image.convert(mode) if mode else image).save(stream, format="PNG")
    return stream.getvalue()


def png_header(width: int, height: int) -> bytes:
    """Return a PNG with a header that declares a size, and no data."""
    chunk = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return model.PNG_MAGIC + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk))


# ---- the model


def test_every_image_of_the_data_round_trips_through_png() -> None:
    for row in model.load_digits().data:
        assert np.array_equal(model.features_from_png(model.png_from_features(row)), row)


def test_the_split_is_deterministic_and_its_halves_are_disjoint(split: model.Split) -> None:
    again = model.load_split()
    assert all(np.array_equal(a, b) for a, b in zip(split, again, strict=True))
    assert len(split.train_labels) + len(split.held_out_labels) == 1797


def test_the_model_is_accurate_and_its_labels_have_the_highest_probability(split: model.Split) -> None:
    answers = model.classify(model.train(split), split.held_out_images)
    right = sum(a["label"] == t for a, t in zip(answers, split.held_out_labels.tolist(), strict=True))
    assert right / len(answers) > 0.95
    for answer in answers:
        assert answer["label"] == int(np.argmax(answer["probabilities"]))
        assert sum(answer["probabilities"]) == pytest.approx(1)


def test_the_committed_image_is_the_one_that_the_code_makes() -> None:
    assert (EXAMPLE / "seven.png").read_bytes()[:8] == model.PNG_MAGIC
    committed = model.features_from_png((EXAMPLE / "seven.png").read_bytes())
    assert np.array_equal(committed, model.features_from_png(model.seven()))


# ---- what is accepted


def test_a_png_is_detected_by_its_bytes_whatever_the_content_type(digits: app.Digits) -> None:
    for content_type in (CURL, "image/png", "application/octet-stream", ""):
        status, answer = post(digits, model.seven(), content_type)
        assert (status, answer["label"], len(answer["probabilities"])) == (200, 7, 10)


def test_an_array_of_64_numbers_gets_the_answer_of_its_png(digits: app.Digits) -> None:
    values = model.features_from_png(model.seven()).tolist()
    assert post(digits, json.dumps(values).encode()) == post(digits, model.seven())
    assert post(digits, json.dumps(values).encode(), "application/json") == post(digits, model.seven())


def test_an_array_of_arrays_gets_a_list_in_order(digits: app.Digits, split: model.Split) -> None:
    rows = split.held_out_images[:200]
    status, answers = post(digits, json.dumps(rows.tolist()).encode(), "application/json")
    one_by_one = [post(digits, model.png_from_features(row))[1]["label"] for row in rows]
    assert (status, [each["label"] for each in answers]) == (200, one_by_one)
    assert isinstance(post(digits, json.dumps(rows[:1].tolist()).encode())[1], list)


def test_a_form_gets_a_list_in_order_of_its_files(digits: app.Digits, split: model.Split) -> None:
    files = [model.png_from_features(row) for row in split.held_out_images[:20]]
    status, answers = post(digits, form(*files), FORM, chunk_size=100)
    one_by_one = [post(digits, file)[1] for file in files]
    assert (status, [each["label"] for each in answers]) == (200, [each["label"] for each in one_by_one])
    for answer, alone in zip(answers, one_by_one, strict=True):
        assert answer["probabilities"] == pytest.approx(alone["probabilities"])


@each_case("mode", ["L", "RGB", "RGBA", "P", "LA", "I;16"])
def test_a_larger_image_is_scaled_down(digits: app.Digits, mode: str) -> None:
    large = np.kron(model.features_from_png(model.seven()).reshape(8, 8) * 255 / 16, np.ones((20, 20)))
    if mode == "I;16":
        stream = io.BytesIO()
        Image.fromarray((large * 257).astype(np.uint16)).save(stream, format="PNG")
        data = stream.getvalue()
    else:
        data = png(large, mode)
    status, answer = post(digits, data)
    assert (status, answer["label"]) == (200, 7)


def test_dark_ink_on_white_or_transparent_paper_is_accepted(digits: app.Digits) -> None:
    ink = model.features_from_png(model.seven()).reshape(8, 8) * 255 / 16
    assert post(digits, png(255 - ink))[1]["label"] == 7
    transparent = np.dstack([np.zeros((8, 8, 3)), ink])
    assert post(digits, png(transparent))[1]["label"] == 7


# ---- what is refused

ROW = [0.0] * 64
SEVEN = model.seven()


def dumps(value: Any) -> bytes:
    return json.dumps(value).encode()


@each_case(
    ("body", "content_type", "status", "text"),
    [
        (b"[1, 2", CURL, 400, "not valid JSON"),
        (b"hello", "application/json", 400, "not valid JSON"),
        (b"[" * 100_000, CURL, 400, "not valid JSON"),
        (b'["\xff"]', CURL, 400, "not valid JSON"),
        (b"", CURL, 400, "empty"),
        (b"", "application/json", 400, "not valid JSON"),
        (dumps([]), CURL, 422, "got 0"),
        (dumps(ROW[1:]), CURL, 422, "expected 64 numbers, got 63"),
        (dumps({"pixels": ROW}), CURL, 422, "got an object"),
        (b"7", "application/json", 422, "got a number"),
        (dumps([*ROW[1:], "1"]), CURL, 422, "value 63 is not a number but a string"),
        (dumps([True, *ROW[1:]]), CURL, 422, "value 0 is not a number but a boolean"),
        (dumps([None, *ROW[1:]]), CURL, 422, "not a number but null"),
        (dumps([float("nan"), *ROW[1:]]), CURL, 422, "value 0 is NaN"),
        (dumps([float("inf"), *ROW[1:]]), CURL, 422, "out of range"),
        (dumps([-0.5, *ROW[1:]]), CURL, 422, "out of range: expected 0 to 16"),
        (dumps([*ROW[1:], 10**400]), CURL, 422, "value 63 is out of range"),
        (dumps([ROW, ROW[1:]]), CURL, 422, "array 1: expected 64 numbers, got 63"),
        (dumps([ROW, 1]), CURL, 422, "array 1: expected an array"),
        (dumps([[0] * 8] * 8), CURL, 422, "array 0: expected 64 numbers, got 8"),
        (dumps([ROW] * (app.MAX_ITEMS + 1)), CURL, 413, "1001 arrays"),
        (b"GIF89a", "image/gif", 415, "neither a PNG nor JSON nor a multipart form"),
        (b"seven", "text/plain", 415, "neither"),
        (SEVEN[:60], CURL, 400, "the PNG is broken"),
        (SEVEN[:60] + b"\x00" * 62, CURL, 400, "the PNG is broken"),
        (model.PNG_MAGIC, "image/png", 400, "no header"),
        (png_header(8, 8), CURL, 400, "the PNG is broken"),
        (png_header(60_000, 60_000), CURL, 413, "60000x60000"),
        (png_header(8, 7), CURL, 422, "8x7 pixels, less than 8x8"),
        (b"\x00" * (app.MAX_BODY_BYTES + 1), CURL, 413, "larger than"),
        (form(b"\x00" * (app.MAX_BODY_BYTES + 1)), FORM, 413, "larger than"),
        (form(*[SEVEN] * (app.MAX_ITEMS + 1)), FORM, 413, "Too many files"),
        (form(*[png_header(2048, 2048)] * 5), FORM, 413, "in total"),
        (form(SEVEN, b"GIF89a"), FORM, 415, "file 1: not a PNG"),
        (form(SEVEN, SEVEN[:60]), FORM, 400, "file 1: the PNG is broken"),
        (form(SEVEN, filename="x=y"), FORM, 422, "'image' is not a file"),
        (form(), FORM, 422, "contains no file"),
        (form(SEVEN), "multipart/form-data", 400, "boundary"),
        (b"nonsense", FORM, 400, "the form cannot be read"),
    ],
)
def test_invalid_input_is_refused_with_the_problem(
    digits: app.Digits, body: bytes, content_type: str, status: int, text: str
) -> None:
    got, answer = post(digits, body, content_type)
    assert (got, list(answer)) == (status, ["error"])
    assert text in answer["error"]


def test_reading_stops_at_the_limit(digits: app.Digits) -> None:
    read = 0

    async def receive() -> dict[str, Any]:
        nonlocal read
        read += 1 << 20
        return {"type": "http.request", "body": b"\x00" * (1 << 20), "more_body": True}

    scope = {"type": "http", "method": "POST", "path": "/", "query_string": b"", "headers": []}
    assert asyncio.run(digits(Request(scope, receive))).status_code == 413
    assert read <= app.MAX_BODY_BYTES + (1 << 20)


# ---- pickling for the workers


def run_elsewhere(code: str, definition: bytes) -> subprocess.CompletedProcess[bytes]:
    """Run code in an interpreter without the example's modules, as on a worker."""
    return subprocess.run(
        [sys.executable, "-I", "-c", code], input=definition, capture_output=True, timeout=60
    )


USE_THE_CLASS = """
import asyncio, pickle, sys
from starlette.requests import Request

async def receive():
    return {"type": "http.request", "body": b"[]"}

digits = pickle.load(sys.stdin.buffer)()
response = asyncio.run(digits(Request({"type": "http", "headers": []}, receive)))
sys.stdout.buffer.write(response.body)
"""


@pytest.mark.slow
def test_the_class_can_be_unpickled_without_its_module() -> None:
    by_name = cloudpickle.dumps(app.Digits)
    cloudpickle.register_pickle_by_value(app)
    cloudpickle.register_pickle_by_value(model)
    try:
        by_value = cloudpickle.dumps(app.Digits)
    finally:
        cloudpickle.unregister_pickle_by_value(app)
        cloudpickle.unregister_pickle_by_value(model)
    assert b"No module named 'app'" in run_elsewhere(USE_THE_CLASS, by_name).stderr
    assert b"expected 64 numbers, got 0" in run_elsewhere(USE_THE_CLASS, by_value).stdout


# ---- the demo's checks


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> Any:
    import demo

    return demo


def test_the_demo_reports_no_problem_for_equal_labels(demo: Any) -> None:
    assert demo.compare([1, 2, 3], [1, 2, 3], [1, 2, 0], []) == []


def test_the_demo_reports_a_different_label_even_at_equal_accuracy(demo: Any) -> None:
    (problem,) = demo.compare([1, 2, 4], [1, 2, 3], [1, 2, 0], [])
    assert problem.startswith("1 labels differ")


def test_the_demo_reports_failed_requests(demo: Any) -> None:
    problems = demo.compare([1, None], [1, 2], [1, 2], ["503 busy"])
    assert "1 requests failed; the first error: 503 busy" in problems[0]
    assert len(problems) == 3


class _Replies(http.server.BaseHTTPRequestHandler):
    """Returns the length of the posted body; refuses a body of one byte."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        length = len(self.rfile.read(int(self.headers["content-length"])))
        body = json.dumps({"label": length}).encode() if length > 1 else b"too short"
        self.send_response(200 if length > 1 else 422)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


def test_the_demo_posts_all_images_and_keeps_their_order(demo: Any) -> None:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Replies)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_port}/digits"
        answers = demo.post_all(url, [b"x" * size for size in range(1, 31)])
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert [answer.label for answer in answers] == [None, *range(2, 31)]
    assert answers[0].problem == "422 too short"


@pytest.mark.parametrize("is_once", [True, False])
def test_the_demo_prints_addresses_only_while_it_serves(
    is_once: bool, demo: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with local_instance(http_options={"port": 0}) as client:
        monkeypatch.setattr(demo.serve, "start", lambda **_: client)
        monkeypatch.setattr(demo, "demonstrate", lambda url: [])
        monkeypatch.setattr(demo, "wait_for_interrupt", lambda: None)
        monkeypatch.setattr(demo, "ENDINGS", ())
        assert demo.run(demo.parse_arguments(["--once"] if is_once else [])) == 0
    assert ("http://" in capsys.readouterr().out) is not is_once


def test_the_demo_counts_an_unreachable_server_as_a_failed_request(demo: Any) -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), _Replies) as server:
        port = server.server_port
    (answer,) = demo.post_all(f"http://127.0.0.1:{port}/digits", [b"x"])
    assert answer.label is None
    assert "ConnectionRefusedError" in answer.problem


def test_the_demo_creates_the_image_if_it_is_missing(
    demo: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert demo.seven_path() == EXAMPLE / "seven.png"
    monkeypatch.setattr(demo, "HERE", tmp_path)
    monkeypatch.setattr(demo.tempfile, "tempdir", str(tmp_path))
    assert demo.seven_path().read_bytes() == SEVEN
