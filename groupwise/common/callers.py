"""Checks of who calls a server on this machine, and limits on time and size of a request.

A page of another site can reach a server on this machine in two ways: through a name that it makes
point here (DNS rebinding), and by a request that it makes the browser send (it can't read the
answer, but the request was served). The first is recognised by the name that was asked for, the
second by the origin that the browser reports.
"""

from __future__ import annotations

import http.client
import io
import ipaddress
import platform
import socket
import sys
import time
from collections.abc import Collection
from http.server import ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

VIEWER_PORT = 7007  # where `groupwise view` listens unless told otherwise
MOST_HEAD = 128 * 1024  # bytes of a request before its body


class WebServer(ThreadingHTTPServer):
    """A server with a thread for each request; one whose client has hung up ends without a word."""

    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Show every error but that of a client that hung up."""
        if not isinstance(sys.exception(), (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)


def own_names(address: str) -> set[str]:
    """Return the names of this machine, beside its addresses."""
    return {"localhost", platform.node().lower(), address.lower()}


def is_meant(host: str, names: Collection[str]) -> bool:
    """Return whether a request for this host was meant for one of these names, or any address."""
    name = _name(host)
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name in names
    return True


def is_own_page(origin: str, host: str) -> bool:
    """Return whether the page that sent a request came from the host that it was sent to."""
    try:
        return urlsplit(origin).netloc.lower() == host.lower() != ""
    except ValueError:
        return False


def is_loopback(address: str) -> bool:
    """Return whether only this machine reaches a server that listens here."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def family_of(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def shown(address: str, port: int) -> str:
    """Return a host as it is written in a URL."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _name(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:  # half of an IPv6 address
        return ""


class Incoming(io.RawIOBase):
    """A client's input, with a time limit for the whole request, not for each byte of it.

    A client that sends a byte a minute would hold its thread for ever.
    """

    def __init__(self, connection: socket.socket, patience: float) -> None:
        self._connection, self._patience = connection, patience
        self.begin()

    def begin(self) -> None:
        """Wait for a request; its time starts with its first byte."""
        self._deadline: float | None = None
        self._head: int | None = 0

    def body(self) -> None:
        """Start reading the body, whose size the caller limits, not this class."""
        self._head = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        now = time.monotonic()
        left = self._patience if self._deadline is None else self._deadline - now
        if left <= 0:
            raise TimeoutError("the request takes too long")
        self._connection.settimeout(left)
        count = self._connection.recv_into(buffer)
        if self._deadline is None:
            self._deadline = time.monotonic() + self._patience
        if self._head is not None:
            self._head += count
            if self._head > MOST_HEAD:
                raise http.client.HTTPException("the head of the request is too long")
        return count
