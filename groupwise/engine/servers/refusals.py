"""Settings of servers that can't work: said before anything is loaded, servers asked included."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from groupwise.engine.servers.link import ServerGone, ServerRefused
from groupwise.engine.servers.server import InferenceServer
from groupwise.engine.servers.vllm import VllmServer
from groupwise.errors import EngineError

if TYPE_CHECKING:
    from groupwise import config


def problems(kind: type[InferenceServer], settings: config.EngineSettings) -> Iterator[str]:
    """Yield what speaks against settings; servers that should be there are asked."""
    name = settings.backend
    if bool(settings.urls) == bool(settings.servers):
        yield (
            f"engine.backend={name} needs servers: give the addresses of some in engine.urls, "
            'such as ["http://127.0.0.1:8000"], or have groupwise start engine.servers of '
            "them; one of the two."
        )
    if settings.folder and not Path(settings.folder).is_dir():
        yield (
            f"engine.folder={settings.folder} is no folder here. Make it, where every server sees "
            "it, too, or leave it out for one machine."
        )
    if settings.command and not settings.servers:
        yield "engine.command would be ignored: no server is started. Set engine.servers."
    if settings.carrier != "folder" and kind is not VllmServer:
        yield (
            f"engine.carrier={settings.carrier} uses vLLM's transfer calls, which {name} has "
            "not. Set engine.carrier=folder."
        )
    for url in settings.urls:
        try:
            facts = kind(url, settings.timeout).look(settings.carrier)
        except (ServerGone, ServerRefused) as error:
            yield (
                f"{error}. Start the server before the run, or correct engine.urls; "
                f"{kind.kind} wants {kind.flags}."
            )
        except EngineError as error:
            yield str(error)
        else:
            if facts.context and facts.context <= settings.max_tokens:
                yield (
                    f"{url} holds {facts.context} tokens of a sequence, and engine.max_tokens="
                    f"{settings.max_tokens} leaves no room for a prompt. Start it with a "
                    "larger context, or lower engine.max_tokens."
                )
