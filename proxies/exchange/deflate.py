"""Compression of WebSocket messages (permessage-deflate, RFC 7692), with bounded decompression.

wsproto compresses, and negotiates most of it. Three things are missing there: a frame of a few kilobytes may
become megabytes before anything sees its size, offers that are not valid are errors or are accepted, and a
ping between the frames of a message ends its compression.
"""

from __future__ import annotations

import re

from wsproto.extensions import PerMessageDeflate
from wsproto.frame_protocol import CloseReason, FrameDecoder, FrameProtocol, Opcode, RsvBits

#: Compressed data is read in pieces of this size, each of which can become about a thousand times as large.
_PIECE_BYTES = 1024
_PARAMETER = re.compile(
    r"(client|server)_no_context_takeover"
    r"|server_max_window_bits=(9|1[0-5])|client_max_window_bits(=(9|1[0-5]))?"
)


class BoundedDeflate(PerMessageDeflate):
    """The extension for one connection.

    Parameters
    ----------
    max_message_bytes : int
        Maximum size of a decompressed message; a larger one closes the connection with code 1009.
    """

    def __init__(self, max_message_bytes: int) -> None:
        super().__init__()
        self._max_message_bytes = max_message_bytes
        self._message_bytes = 0
        self._is_control = False

    def accept(self, offer: str) -> bool | str | None:
        """Return the parameters of the answer to an offer; None if it is not valid, or not the first."""
        parameters = [parameter.strip() for parameter in offer.split(";")[1:]]
        names = {parameter.partition("=")[0] for parameter in parameters}
        if self.enabled() or len(names) < len(parameters) or not all(map(_PARAMETER.fullmatch, parameters)):
            return None
        return super().accept(offer)

    def frame_inbound_header(
        self, proto: FrameDecoder | FrameProtocol, opcode: Opcode, rsv: RsvBits, payload_length: int
    ) -> CloseReason | RsvBits:
        """Note which message the next data belongs to."""
        self._is_control = opcode.iscontrol()
        if self._is_control:
            return CloseReason.PROTOCOL_ERROR if rsv.rsv1 else RsvBits(False, False, False)
        if opcode in (Opcode.TEXT, Opcode.BINARY):
            self._message_bytes = 0
        return super().frame_inbound_header(proto, opcode, rsv, payload_length)

    def frame_inbound_payload_data(
        self, proto: FrameDecoder | FrameProtocol, data: bytes
    ) -> bytes | CloseReason:
        """Return the decompressed data, or why the connection must be closed."""
        if self._is_control:
            return data
        parts: list[bytes] = []
        for start in range(0, len(data), _PIECE_BYTES):
            part = super().frame_inbound_payload_data(proto, data[start : start + _PIECE_BYTES])
            if isinstance(part, CloseReason):
                return part
            parts.append(part)
            self._message_bytes += len(part)
            if self._message_bytes > self._max_message_bytes:
                return CloseReason.MESSAGE_TOO_BIG
        return b"".join(parts)

    def frame_inbound_complete(
        self, proto: FrameDecoder | FrameProtocol, fin: bool
    ) -> bytes | CloseReason | None:
        """Return the rest of a message at its end."""
        return None if self._is_control else super().frame_inbound_complete(proto, fin)
