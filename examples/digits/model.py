"""A classifier of handwritten digits, and the conversion of images and numbers to its features.

This module is independent of HTTP and of daskserve. An image is 8 by 8 pixels from 0 (paper) to 16 (ink), the
scale of scikit-learn's digits. As a PNG it is grayscale, with white ink on black paper.
"""

from __future__ import annotations

import io
import struct
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split
from threadpoolctl import threadpool_limits

SIDE = 8
PIXELS = SIDE * SIDE
INK = 16
#: A PNG with a longer side is refused before decoding: a few kilobytes can decode to gigabytes.
MAX_SIDE = 2048
PNG_MAGIC = b"\x89PNG\r\n\x1a\n"


class InputError(Exception):
    """The input cannot be classified; ``status`` is the HTTP status of the response."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(status, message)
        self.status = status
        self.message = message


class Split(NamedTuple):
    """The digits, as rows of 64 numbers, split into training and held-out halves."""

    train_images: np.ndarray
    train_labels: np.ndarray
    held_out_images: np.ndarray
    held_out_labels: np.ndarray


def load_split() -> Split:
    """Return the split, which is the same in every process."""
    digits = load_digits()
    train_images, held_out_images, train_labels, held_out_labels = train_test_split(
        digits.data, digits.target, test_size=0.5, random_state=0, stratify=digits.target
    )
    return Split(train_images, train_labels, held_out_images, held_out_labels)


def train(split: Split) -> LogisticRegression:
    """Return a fitted classifier.

    Training uses one thread and Newton's method, which converges fully: every replica and the offline check
    must have the same model, regardless of the number of threads in their processes.
    """
    with threadpool_limits(1):
        model = LogisticRegression(C=0.01, solver="newton-cholesky")
        return model.fit(split.train_images, split.train_labels)


def classify(model: LogisticRegression, rows: np.ndarray) -> list[dict[str, Any]]:
    """Return the label and probabilities of each row of features."""
    probabilities = model.predict_proba(rows)
    labels = model.classes_[probabilities.argmax(axis=1)]
    return [
        {"label": int(label), "probabilities": [float(p) for p in row]}
        for label, row in zip(labels, probabilities, strict=True)
    ]


def features_from_numbers(values: Any) -> np.ndarray:
    """Return the features of a decoded JSON array of 64 numbers from 0 to 16."""
    if not isinstance(values, list):
        raise InputError(422, f"expected an array of {PIXELS} numbers, got {_json_type(values)}")
    if len(values) != PIXELS:
        raise InputError(422, f"expected {PIXELS} numbers, got {len(values)}")
    for index, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InputError(422, f"value {index} is not a number but {_json_type(value)}")
        if value != value:
            raise InputError(422, f"value {index} is NaN")
        if not 0 <= value <= INK:
            raise InputError(422, f"value {index} is out of range: expected 0 to {INK}")
    return np.array(values, dtype=float)


def features_from_png(data: bytes) -> np.ndarray:
    """Return the features of a PNG: its exact pixels if it is 8 by 8, otherwise scaled down."""
    image = _decode(data)
    gray = np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BOX), dtype=float)
    border = np.concatenate([gray[0], gray[-1], gray[1:-1, 0], gray[1:-1, -1]])
    if np.median(border) > 127:  # dark ink on white paper, as people usually draw
        gray = 255 - gray
    return np.asarray(np.round(gray * INK / 255)).ravel()


def png_from_features(row: np.ndarray) -> bytes:
    """Return an 8 by 8 grayscale PNG, from which `features_from_png` returns the same features."""
    pixels = np.round(np.asarray(row).reshape(SIDE, SIDE) * 255 / INK).astype(np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, format="PNG")
    return stream.getvalue()


def seven() -> bytes:
    """Return a PNG of the first held-out 7."""
    split = load_split()
    return png_from_features(split.held_out_images[split.held_out_labels == 7][0])


def png_size(data: bytes) -> tuple[int, int]:
    """Return the width and height from the header; raise if the image must not be decoded."""
    # Layout of the first chunk: signature 8 bytes, length 4, "IHDR", width 4, height 4.
    if not data.startswith(PNG_MAGIC) or data[12:16] != b"IHDR" or len(data) < 24:
        raise InputError(400, "the PNG is broken: it has no header")
    width, height = struct.unpack(">II", data[16:24])
    if max(width, height) > MAX_SIDE:
        raise InputError(413, f"the PNG is {width}x{height} pixels, more than {MAX_SIDE}x{MAX_SIDE}")
    if min(width, height) < SIDE:
        raise InputError(422, f"the PNG is {width}x{height} pixels, less than {SIDE}x{SIDE}")
    return width, height


def _decode(data: bytes) -> Image.Image:
    """Return an 8-bit grayscale image without transparency."""
    png_size(data)
    try:
        image = Image.open(io.BytesIO(data), formats=["PNG"])
        image.load()
    except Exception as error:  # the decoder raises many kinds of errors for broken files
        raise InputError(400, f"the PNG is broken: {error}") from error
    if image.mode.startswith("I"):  # 16 bits, which Pillow clips to 255 instead of scaling
        return Image.fromarray((np.asarray(image) / 257).astype(np.uint8))
    if image.has_transparency_data:
        paper = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(paper, image.convert("RGBA")).convert("L")
    return image.convert("L")


def _json_type(value: Any) -> str:
    names = {type(None): "null", bool: "a boolean", str: "a string", list: "an array", dict: "an object"}
    return names.get(type(value), "a number")
