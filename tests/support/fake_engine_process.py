"""The stand-in of a server as a program of its own, with vLLM's words for model and port."""

from __future__ import annotations

import argparse
import sys
import threading
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[i]) for i in (2, 0)]

from fake_engine_server import FakeServer  # noqa: E402

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path)
    parser.add_argument("--port", type=int)
    given, _ = parser.parse_known_args()
    FakeServer(given.model, port=given.port)
    threading.Event().wait()
