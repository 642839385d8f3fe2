"""A tiny MCP server over standard input and output: two tools, on two pages of the list."""

from __future__ import annotations

import json
import sys
import time

COUNT = 0


def answer(method: str, given: dict) -> dict:  # type: ignore[type-arg]
    global COUNT
    if method == "initialize":
        return {"protocolVersion": given["protocolVersion"], "capabilities": {"tools": {}}}
    if method == "tools/list":
        schema = {"type": "object", "properties": {"word": {"type": "string"}}}
        if given.get("cursor") == "2":
            return {"tools": [{"name": "fail", "inputSchema": schema}]}
        one = {"name": "count", "description": "Count calls.", "inputSchema": schema}
        return {"tools": [one], "nextCursor": "2"}
    COUNT += 1
    if given["name"] == "fail":
        return {"content": [{"type": "text", "text": "it failed"}], "isError": True}
    if given["arguments"].get("word") == "hang":
        time.sleep(10_000)
    if given["arguments"].get("word") == "end":
        sys.exit(0)
    return {"content": [{"type": "text", "text": f"{COUNT}: {given['arguments'].get('word')}"}]}


print("a line that is no message", flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    if "id" in asked:
        said = answer(asked["method"], asked.get("params") or {})
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": said}), flush=True)
