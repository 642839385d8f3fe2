"""A small hub on this machine: the pages that huggingface_hub asks for, and what can go wrong."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Repository:
    """Commits by name; branches point to them."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    def push(self, files: dict[str, bytes], branch: str = "main") -> str:
        commit = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.commits[commit] = files
        self.branches[branch] = commit
        return commit

    def commit(self, revision: str) -> str | None:
        return self.branches.get(revision, revision if revision in self.commits else None)


@dataclass
class Hub:
    """What it holds, what it was asked for, and how it misbehaves."""

    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)  # "models/org/name"
    gated: set[str] = field(default_factory=set)
    cut: set[str] = field(default_factory=set)  # files of which half the bytes come
    asked: list[str] = field(default_factory=list)

    def model(self, name: str) -> Repository:
        return self.repositories.setdefault(f"models/{name}", Repository())

    def data(self, name: str) -> Repository:
        return self.repositories.setdefault(f"datasets/{name}", Repository())

    def fetched(self) -> set[str]:
        """Names of the files whose bytes were asked for."""
        found = (re.fullmatch(r"GET /.*/resolve/\w+/(.*)", line) for line in self.asked)
        return {match[1] for match in found if match}


PAGE = re.compile(
    r"/(?:api/(?P<kind>models|datasets)/(?P<repo>[^/]+/[^/]+)/(?P<what>revision|tree)/(?P<rev>[^/?]+)"
    r"|(?P<data>datasets/)?(?P<name>[^/]+/[^/]+)/resolve/(?P<at>[^/]+)/(?P<file>.+?))(?:\?.*)?"
)


class Pages(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.0"  # a connection a page: none outlives the server

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        self.hub.asked.append(f"{self.command} {self.path}")
        match = PAGE.fullmatch(self.path)
        if match is None:
            return self._send(404, {}, b"", body)
        kind = match["kind"] or ("datasets" if match["data"] else "models")
        key = f"{kind}/{match['repo'] or match['name']}"
        repository = self.hub.repositories.get(key)
        if repository is None:  # as the hub does for private ones
            return self._send(401, {"X-Error-Code": "RepoNotFound"}, b"{}", body)
        if key in self.hub.gated:
            headers = {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted"}
            return self._send(403, headers, b"{}", body)
        commit = repository.commit(match["rev"] or match["at"])
        if commit is None:
            return self._send(404, {"X-Error-Code": "RevisionNotFound"}, b"{}", body)
        files = repository.commits[commit]
        if match["what"] == "revision":
            listed = [{"rfilename": name} for name in files]
            page = {"id": key.partition("/")[2], "sha": commit, "siblings": listed}
            return self._send(200, {"Content-Type": "application/json"}, _json(page), body)
        if match["what"] == "tree":
            tree = [
                {"type": "file", "path": name, "size": len(x), "oid": hashlib.sha1(x).hexdigest()}
                for name, x in files.items()
            ]
            return self._send(200, {"Content-Type": "application/json"}, _json(tree), body)
        name = match["file"]
        if name not in files:
            return self._send(404, {"X-Error-Code": "EntryNotFound"}, b"", body)
        headers = {
            "X-Repo-Commit": commit,
            "ETag": f'"{hashlib.sha1(files[name]).hexdigest()}"',
            "X-Linked-Size": str(len(files[name])),
        }
        content = files[name]
        if name in self.hub.cut and body:
            content = content[: len(content) // 2]
        self._send(200, headers, content, body)

    def _send(self, status: int, headers: dict[str, str], content: bytes, body: bool) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            self.wfile.write(content)


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


@contextmanager
def serving() -> Iterator[Hub]:
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Served", (Pages,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
