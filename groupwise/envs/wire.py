"""Messages between a worker and who asks it: neither ever waits for the other to read."""

from __future__ import annotations

import os
import struct

SIZE = struct.Struct("!Q")
PIECE = 2**20  # bytes that are read at once
LONGEST = 2**28  # bytes of a message


class Outbox:
    """Messages to be written, as far as the other side takes them."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.data = bytearray()
        os.set_blocking(descriptor, False)

    def put(self, message: bytes) -> None:
        self.data += SIZE.pack(len(message)) + message

    def flush(self) -> bool:
        """Write what can be written. Return whether nothing is left."""
        while self.data:
            try:
                written = os.write(self.descriptor, self.data[:PIECE])
            except BlockingIOError:
                return False
            except OSError:  # the other side is gone: found out where it is read
                self.data.clear()
                return True
            del self.data[:written]
        return True


class Frames:
    """Messages as they come in."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.data = bytearray()
        self.ended = False  # by the other side, or by what is no message

    def read(self) -> list[bytes]:
        """Return the messages that are complete, without waiting for the rest."""
        while not self.ended:
            try:
                piece = os.read(self.descriptor, PIECE)
            except BlockingIOError:
                break
            except OSError:
                piece = b""
            self.data += piece
            self.ended = not piece
            if len(piece) < PIECE:
                break
        found = []
        while len(self.data) >= SIZE.size:
            (size,) = SIZE.unpack_from(self.data)
            if size > LONGEST:
                self.ended = True
                break
            if len(self.data) < SIZE.size + size:
                break
            found.append(bytes(self.data[SIZE.size : SIZE.size + size]))
            del self.data[: SIZE.size + size]
        return found
