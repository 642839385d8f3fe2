"""Tools of an MCP server, over its standard input and output.

Of the protocol four messages are needed: hello, ready, the list of the tools, a call. They are
written here rather than taken from the protocol's own package, which brings a web server, a schema
checker and an HTTP client for the parts that are not used.
"""

from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from groupwise.envs.shapes.tools import WithTools
from groupwise.envs.toolbox import Tool, Toolbox, ToolFailed, TooSlow, within
from groupwise.errors import WorldError

PREFIX = "mcp:"
PROTOCOL = "2025-06-18"
LONGEST = 2**24  # bytes of a message
PATIENCE = 60.0  # seconds for a server to come up and list its tools
PAGES = 100  # of the list


class McpServer:
    """A server in a process of its own."""

    def __init__(self, command: str) -> None:
        self.command = command
        self.process: asyncio.subprocess.Process | None = None
        self.waiting: dict[int, asyncio.Future[Mapping[str, Any]]] = {}
        self.asked = 0
        self.reading: asyncio.Task[None] | None = None

    async def start(self) -> None:
        pipe = asyncio.subprocess.PIPE
        words = shlex.split(self.command)
        try:
            self.process = await asyncio.create_subprocess_exec(
                *words, stdin=pipe, stdout=pipe, limit=LONGEST
            )
        except OSError as error:
            raise WorldError(
                f"The MCP server {self.command!r} can't be started: {error}. Write the command "
                "as in a terminal: mcp:python server.py."
            ) from None
        self.reading = asyncio.create_task(self._read())
        about = {"name": "groupwise", "version": "1"}
        hello = {"protocolVersion": PROTOCOL, "capabilities": {}, "clientInfo": about}
        await self.ask("initialize", hello)
        await self._write({"method": "notifications/initialized"})

    async def ask(self, method: str, parameters: Mapping[str, Any]) -> Mapping[str, Any]:
        number, self.asked = self.asked, self.asked + 1
        answer: asyncio.Future[Mapping[str, Any]] = asyncio.get_running_loop().create_future()
        self.waiting[number] = answer
        try:
            await self._write({"id": number, "method": method, "params": parameters})
            said = await answer
        finally:
            self.waiting.pop(number, None)
        if "error" in said:
            raise ToolFailed(str((said["error"] or {}).get("message", said["error"])))
        return said.get("result") or {}

    async def started(self) -> list[Tool]:
        """Start, and return the tools."""
        try:
            return await within(PATIENCE, self._listed())
        except (ToolFailed, TooSlow) as error:
            await self.close()
            why = str(error) or f"it says nothing for {PATIENCE:g} s"
            raise WorldError(
                f"The MCP server {self.command!r} does not answer: {why}. Run the command by hand: "
                "it must wait for messages on its standard input."
            ) from None

    async def _listed(self) -> list[Tool]:
        await self.start()
        return [_tool(self, each) for each in await self.tools()]

    async def tools(self) -> list[Mapping[str, Any]]:
        found: list[Mapping[str, Any]] = []
        page: dict[str, Any] = {}
        for _ in range(PAGES):
            told = await self.ask("tools/list", page)
            found += told.get("tools", [])
            if not told.get("nextCursor"):
                break
            page = {"cursor": told["nextCursor"]}
        return found

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        told = await self.ask("tools/call", {"name": name, "arguments": dict(arguments)})
        said = "\n".join(_text(each) for each in told.get("content") or ())
        if told.get("isError"):
            raise ToolFailed(said or "the tool failed")
        if not said and told.get("structuredContent") is not None:
            return json.dumps(told["structuredContent"], ensure_ascii=False)
        return said

    async def _write(self, message: Mapping[str, Any]) -> None:
        if self.process is None or self.process.stdin is None:
            raise ToolFailed("the MCP server does not run")
        if self.reading is not None and self.reading.done():
            raise ToolFailed("the MCP server has ended")
        try:
            self.process.stdin.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")
            await self.process.stdin.drain()
        except (ConnectionError, RuntimeError):
            raise ToolFailed("the MCP server has ended") from None

    async def _read(self) -> None:
        """Hand out answers until the server ends; what is asked of us is refused."""
        assert self.process is not None and self.process.stdout is not None
        with suppress(ValueError, OSError):  # a line longer than any message
            while line := await self.process.stdout.readline():
                with suppress(json.JSONDecodeError):  # servers that print
                    await self._take(json.loads(line))
        for answer in self.waiting.values():
            if not answer.done():
                answer.set_result({"error": {"message": "the MCP server has ended"}})

    async def _take(self, said: Any) -> None:
        if not isinstance(said, dict) or "id" not in said:
            return
        if "method" in said:
            refused = {"code": -32601, "message": "not supported"}
            await self._write({"id": said["id"], "error": refused})
            return
        answer = self.waiting.get(said["id"])
        if answer is not None and not answer.done():
            answer.set_result(said)

    async def close(self) -> None:
        if self.reading is not None:
            self.reading.cancel()
        if self.process is not None and self.process.stdin is not None:
            self.process.stdin.close()
            with suppress(ProcessLookupError):
                self.process.kill()
            await self.process.wait()


def _text(content: Mapping[str, Any]) -> str:
    kind = content.get("type")
    if kind == "text":
        return str(content.get("text", ""))
    if kind == "resource":
        return str((content.get("resource") or {}).get("text", ""))
    return f"[{kind}, which can't be shown as text]"


class MCPTools(WithTools):
    """The tools of servers, each started for the episode alone, beside functions as tools."""

    def __init__(self, commands: Sequence[str], box: Toolbox) -> None:
        super().__init__(box)
        self.servers = [McpServer(command) for command in commands]

    async def prepare(self) -> None:
        """Start the servers and take their tools in."""
        listed = await asyncio.gather(*(server.started() for server in self.servers))
        self.box = self.box.with_more([each for tools in listed for each in tools])
        self.tools = self.box.schemas

    async def close(self) -> None:
        for server in self.servers:
            await server.close()


def _tool(server: McpServer, listed: Mapping[str, Any]) -> Tool:
    name = str(listed["name"])
    known = {
        "name": name,
        "description": listed.get("description") or "",
        "parameters": listed.get("inputSchema") or {"type": "object", "properties": {}},
    }

    async def called(**arguments: Any) -> str:
        return await server.call(name, arguments)

    return Tool(name, {"type": "function", "function": known}, called, concurrent=True)
