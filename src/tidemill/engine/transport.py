"""Messages over a socket pair: msgpack frames with a length and a type in front.

A socket pair instead of a message broker: nothing to name or clean up on disk, and when either process dies, however it
dies, the other one reads the end of the stream at once.
"""

from __future__ import annotations

import select
import socket
import struct
from typing import Any

import msgspec

from tidemill.engine.messages import Abort, Add, Failed, Outputs, Ping, Pong, Progress, Ready, Start

TYPES: tuple[type, ...] = (Start, Add, Abort, Ping, Ready, Failed, Progress, Pong, Outputs)
HEADER = struct.Struct("<IB")
SOCKET_BUFFER = 4 * 2**20

_index = {kind: index for index, kind in enumerate(TYPES)}
_decoders: list[msgspec.msgpack.Decoder[Any]] = [msgspec.msgpack.Decoder(kind) for kind in TYPES]
_encoder = msgspec.msgpack.Encoder()


def encode(message: Any) -> bytes:
    payload = _encoder.encode(message)
    return HEADER.pack(len(payload), _index[type(message)]) + payload


class FrameParser:
    """Bytes in, whole messages out."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        self._buffer += data
        messages, start = [], 0
        while len(self._buffer) - start >= HEADER.size:
            length, kind = HEADER.unpack_from(self._buffer, start)
            end = start + HEADER.size + length
            if len(self._buffer) < end:
                break
            messages.append(_decoders[kind].decode(bytes(self._buffer[start + HEADER.size : end])))
            start = end
        del self._buffer[:start]
        return messages


class SocketInbox:
    """The engine's side: messages from a blocking socket, without waiting while there is work."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._parser = FrameParser()
        # poll, not select: the descriptor inherited from a busy server may be past what select can name.
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN | select.POLLHUP)

    def take(self, block: bool) -> list[Any] | None:
        messages: list[Any] = []
        while True:
            if not self._poll.poll(None if block and not messages else 0):
                return messages
            data = self._connection.recv(2**20)
            if not data:
                return None
            messages.extend(self._parser.feed(data))


def socket_pair() -> tuple[socket.socket, socket.socket]:
    pair = socket.socketpair()
    for end in pair:
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            end.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER)
    return pair
