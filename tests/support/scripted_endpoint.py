"""A chat endpoint on this machine that answers as a test says, and remembers what it was asked."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Scripted(ThreadingHTTPServer):
    """Answers what `respond(body)` gives: a text, or (status, headers)."""

    def __init__(self, respond):
        self.respond, self.bodies, self.keys = respond, [], []
        self.lock, self.busy, self.most = threading.Lock(), 0, 0
        super().__init__(("127.0.0.1", 0), ScriptedHandler)
        threading.Thread(target=self.serve_forever, args=[0.01], daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class ScriptedHandler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        with server.lock:
            server.bodies.append(body)
            server.keys.append(self.headers.get("Authorization"))
            server.busy += 1
            server.most = max(server.most, server.busy)
        found = server.respond(body)
        with server.lock:
            server.busy -= 1
        if isinstance(found, tuple):
            self.send_response(found[0])
            for name, value in found[1].items():
                self.send_header(name, value)
            self.end_headers()
            return
        self.send_response(200)
        self.end_headers()
        if callable(found):
            return found(self.wfile)
        reason = "length" if found.endswith("(cut)") else "stop"
        choice = {"message": {"content": found.removesuffix("(cut)")}, "finish_reason": reason}
        self.wfile.write(json.dumps({"choices": [choice]}).encode())

    def log_message(self, *args):
        pass
