"""Messages between two processes that do not trust each other: JSON, each with its length."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

MAX_FRAME = 32 * 2**20


class Gone(Exception):
    """The other side has ended."""


def send(connection: socket.socket, value: Any) -> None:
    data = json.dumps(value).encode()
    if len(data) > MAX_FRAME:
        raise ValueError(f"a value of {len(data)} bytes is too large to be handed over")
    try:
        connection.sendall(struct.pack(">I", len(data)) + data)
    except OSError as error:
        raise Gone("has ended") from error


def receive(connection: socket.socket) -> Any:
    (length,) = struct.unpack(">I", _exactly(connection, 4))
    if length > MAX_FRAME:
        raise Gone(f"sent {length} bytes at once")
    try:
        return json.loads(_exactly(connection, length))
    except (ValueError, RecursionError) as error:
        raise Gone("sent what can't be read") from error


def _exactly(connection: socket.socket, length: int) -> bytes:
    parts = []
    while length:
        try:
            part = connection.recv(min(length, 2**20))
        except OSError as error:
            raise Gone("has ended") from error
        if not part:
            raise Gone("has ended")
        parts.append(part)
        length -= len(part)
    return b"".join(parts)
