"""A judge as the reward: any model behind an endpoint in OpenAI's form.

    python examples/judge.py

Here a stand-in of ten lines answers in its place, as a judge would: some words, and a verdict as
JSON in the last line. For a real one, `groupwise serve MODEL` or any server, and its url below.
"""

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from groupwise import load_config, train


class StandIn(BaseHTTPRequestHandler):
    """Reads the question and the answer that it is shown, and gives 0 to 5 points."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        shown = re.findall(r"BEGIN \w+\n(.*?)\nEND", asked["messages"][1]["content"], re.S)
        total = sum(map(int, re.findall(r"\d+", shown[0])))
        off = abs(total - int(shown[1])) if shown[1].isdigit() else 9
        verdict = f"The sum is {total}.\n" + json.dumps({"score": max(0, 5 - off)})
        reply = json.dumps({"choices": [{"message": {"content": verdict}}]}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *_: object) -> None: ...


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), StandIn)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    parts = {f"judge(url='{url}', model='stand-in')": 1.0, "number": 0.0}  # 0: shown, not learned
    config = load_config("configs/tiny.toml", steps=40, reward={"parts": parts})
    train(config, "runs/judge")
