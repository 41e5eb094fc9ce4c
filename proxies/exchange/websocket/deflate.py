"""Compression of WebSocket messages (permessage-deflate, RFC 7692), decompressed in small steps.

wsproto negotiates the extension and compresses. It would also decompress, but a whole frame at a time: a few
kilobytes may become megabytes before their size is checked, while all other work on the loop waits. So
compressed frames pass through wsproto unchanged (`MessageDeflate`), and `Inflation` decompresses them in
slices. This also corrects three bugs of wsproto: invalid offers are declined, a ping between the frames of a
message does not end its compression, and a message may end its deflate stream (RFC 7692, 7.2.3.4).
"""

from __future__ import annotations

import re
import zlib
from codecs import IncrementalDecoder, getincrementaldecoder
from collections.abc import Iterator
from typing import Any

from wsproto.events import BytesMessage, TextMessage
from wsproto.extensions import PerMessageDeflate
from wsproto.frame_protocol import CloseReason, FrameDecoder, FrameProtocol, Opcode, RsvBits

from daskserve.common.formatting import shown
from daskserve.proxies.exchange.limits.limits import (
    FREE_BYTES,
    FREE_RATIO,
    INFLATION_RATE,
    INFLATION_RATIO,
    InflationRules,
)
from daskserve.proxies.exchange.limits.loop_work import SLICE_BYTES

_PARAMETER = re.compile(
    r"(client|server)_no_context_takeover"
    r"|server_max_window_bits=(9|1[0-5])|client_max_window_bits(=(9|1[0-5]))?"
)
#: The end of every compressed message, which clients leave out.
_TAIL = b"\x00\x00\xff\xff"


class MessageDeflate(PerMessageDeflate):
    """The extension of one connection: compresses messages, and records which received ones are compressed.

    Attributes
    ----------
    is_compressed, is_text : bool
        The kind of the message to which the last data belongs. wsproto reports compressed text as bytes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_compressed = self.is_text = False

    def accept(self, offer: str) -> bool | str | None:
        """Return the parameters with which an offer is accepted; None for an invalid or a second offer."""
        parameters = [parameter.strip() for parameter in offer.split(";")[1:]]
        names = {parameter.partition("=")[0] for parameter in parameters}
        if self.enabled() or len(names) < len(parameters) or not all(map(_PARAMETER.fullmatch, parameters)):
            return None
        return super().accept(offer)

    def frame_inbound_header(
        self, proto: FrameDecoder | FrameProtocol, opcode: Opcode, rsv: RsvBits, payload_length: int
    ) -> CloseReason | RsvBits:
        """Record the kind of the message to which the next data belongs."""
        begins = opcode in (Opcode.TEXT, Opcode.BINARY)
        if rsv.rsv1 and not begins:
            return CloseReason.PROTOCOL_ERROR
        if begins:
            self.is_compressed = rsv.rsv1
            self.is_text = opcode is Opcode.TEXT
        return RsvBits(begins, False, False)

    def frame_inbound_payload_data(self, proto: FrameDecoder | FrameProtocol, data: bytes) -> bytes:
        """Return the data unchanged, and keep wsproto from decoding it as text while it is compressed."""
        assert isinstance(proto, FrameDecoder)
        if self.is_compressed and proto.effective_opcode is Opcode.TEXT:
            proto.effective_opcode = Opcode.BINARY
        return data

    def frame_inbound_complete(self, proto: FrameDecoder | FrameProtocol, fin: bool) -> None:
        """Do nothing: `Inflation` completes messages."""


class InflationError(Exception):
    """A message cannot be decompressed, or exceeds a limit; its connection must be closed.

    Attributes
    ----------
    code : int
        The close code.
    limit : str, optional
        The limit that the client has hit.
    """

    def __init__(self, text: str, code: CloseReason, limit: str | None = None) -> None:
        super().__init__(text, code, limit)
        self.text = text
        self.code = int(code)
        self.limit = limit


class Inflation:
    """Decompresses the messages of one connection.

    Parameters
    ----------
    deflate : MessageDeflate
        The connection's extension.
    """

    def __init__(self, deflate: MessageDeflate, rules: InflationRules) -> None:
        self._deflate = deflate
        self._rules = rules
        self._zlib: Any = None
        self._decoder: IncrementalDecoder | None = None  # of a text
        # Of the current message:
        self._received_bytes = self._message_bytes = 0
        #: How much of the burst was used, and when that was last updated.
        self._burst_bytes = 0.0
        self._burst_at = 0.0

    @property
    def applies(self) -> bool:
        """Whether the last data belongs to a compressed message."""
        return self._deflate.is_compressed

    def parts(self, event: BytesMessage, now: float) -> Iterator[TextMessage | BytesMessage]:
        """Decompress a part of a message, and yield it in slices.

        Raises
        ------
        InflationError
            The data is not valid, or the client has hit a limit.
        """
        self._receive(len(event.data), now)
        is_last = event.message_finished
        rest = bytes(event.data) + _TAIL if is_last else bytes(event.data)
        has_more = True
        while has_more:
            piece, rest = self._inflate(rest)
            self._count(len(piece))
            has_more = bool(rest) or len(piece) == SLICE_BYTES
            is_end = is_last and not has_more
            yield self._event(piece, is_end)
        if is_last:
            self._received_bytes = self._message_bytes = 0
            if self._deflate.client_no_context_takeover:
                self._zlib = None

    def _inflate(self, data: bytes) -> tuple[bytes, bytes]:
        """Return a decompressed slice, and the rest of the data."""
        if self._zlib is None:
            self._zlib = zlib.decompressobj(-self._deflate.client_max_window_bits)
        stream = self._zlib
        try:
            piece = stream.decompress(data, SLICE_BYTES)
        except zlib.error as error:
            raise InflationError(
                f"a compressed message is not valid: {error}", CloseReason.INVALID_FRAME_PAYLOAD_DATA
            ) from error
        if stream.eof:
            self._zlib = None
            return piece, stream.unused_data
        return piece, stream.unconsumed_tail

    def _event(self, piece: bytes, is_end: bool) -> TextMessage | BytesMessage:
        if not self._deflate.is_text:
            return BytesMessage(data=bytearray(piece), message_finished=is_end)
        if self._decoder is None:
            self._decoder = getincrementaldecoder("utf-8")()
        try:
            text = self._decoder.decode(piece, is_end)
        except UnicodeDecodeError as error:
            raise InflationError(str(error), CloseReason.INVALID_FRAME_PAYLOAD_DATA) from error
        if is_end:
            self._decoder = None
        return TextMessage(data=text, message_finished=is_end)

    def _receive(self, size_bytes: int, now: float) -> None:
        self._received_bytes += size_bytes
        free_bytes = (now - self._burst_at) * self._rules.bytes_per_s + FREE_RATIO * size_bytes
        self._burst_bytes = max(0.0, self._burst_bytes - free_bytes)
        self._burst_at = now

    def _count(self, size_bytes: int) -> None:
        rules = self._rules
        self._message_bytes += size_bytes
        self._burst_bytes += size_bytes
        if self._message_bytes > max(FREE_BYTES, rules.max_ratio * self._received_bytes):
            raise InflationError(
                f"{INFLATION_RATIO} allows {shown(rules.max_ratio)} times the compressed size",
                CloseReason.MESSAGE_TOO_BIG,
                INFLATION_RATIO,
            )
        if self._burst_bytes > rules.burst_bytes:
            raise InflationError(
                f"{INFLATION_RATE} allows {rules.bytes_per_s:.0f} bytes per second",
                CloseReason.POLICY_VIOLATION,
                INFLATION_RATE,
            )
