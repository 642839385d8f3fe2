"""Ways of weights to a server: by a folder, as an adapter, or by vLLM's transfer calls.

A carrier is `begin`-ed once for every version and carries it to one server at a time, so that a
server that comes back later gets the same weights.
"""

from __future__ import annotations

import base64
import importlib
import pickle
import shutil
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from groupwise.engine.servers.server import InferenceServer
from groupwise.engine.servers.vllm import VllmServer
from groupwise.engine.servers.weights import PolicyWeights
from groupwise.errors import EngineError

CHUNK = 2**29  # bytes of tensors that one call hands over
Handle = dict[str, tuple[Any, ...]]  # by the GPU that it is of


class Carrier(Protocol):
    """Takes the policy's weights to servers."""

    def begin(self, version: str) -> None:
        """Take the policy as it is now."""
        ...

    def carry(self, server: InferenceServer, version: str) -> None:
        """Bring it to one server, whole."""
        ...


class FolderCarrier:
    """A folder of safetensors that servers read: they must see the same files."""

    def __init__(self, weights: PolicyWeights, root: Path) -> None:
        self.weights, self.root = weights, root
        self.place: Path | None = None

    def begin(self, version: str) -> None:
        before, self.place = self.place, self.root / f"weights-{version}"
        self.write(self.place)
        if before is not None and before != self.place:
            shutil.rmtree(before, ignore_errors=True)

    def write(self, place: Path) -> None:
        self.weights.folder(place)

    def carry(self, server: InferenceServer, version: str) -> None:
        assert self.place is not None
        server.take_folder(self.place, version)


class AdapterCarrier(FolderCarrier):
    """The adapter alone: the base that a server runs stays."""

    def write(self, place: Path) -> None:
        self.weights.adapter(place)

    def carry(self, server: InferenceServer, version: str) -> None:
        assert self.place is not None
        server.take_adapter(self.place, version)


def cuda_handle(tensor: Tensor) -> Handle:
    """Return how another process on this GPU finds a tensor."""
    from torch.multiprocessing.reductions import reduce_tensor

    if not tensor.is_cuda:
        raise EngineError(
            "engine.carrier=ipc hands over tensors on a GPU, and the policy lies on the CPU. Set "
            "engine.carrier=folder."
        )
    reduce: Callable[[Tensor], tuple[Any, tuple[Any, ...]]] = reduce_tensor
    gpu = torch.cuda.get_device_properties(tensor.device)
    return {str(gpu.uuid): reduce(tensor)[1]}


class IpcCarrier:
    """CUDA IPC: a server on the same GPU reads tensors where they lie, a chunk at a time."""

    def __init__(
        self, weights: PolicyWeights, handle: Callable[[Tensor], Handle] = cuda_handle
    ) -> None:
        self.weights, self.handle = weights, handle

    def begin(self, version: str) -> None:
        """Keep nothing: tensors are read when a server takes them."""

    def carry(self, server: InferenceServer, version: str) -> None:
        vllm = _vllm(server, "ipc")
        vllm.init_weight_transfer_engine({"packed": False})
        vllm.start_weight_update()
        for chunk in chunks(self.weights.tensors(), CHUNK):
            # One export a tensor, and all of them alive until the call is answered.
            handles = [self.handle(tensor) for _, tensor in chunk]
            vllm.update_weights(
                {
                    **described(chunk),
                    "ipc_handles_pickled": base64.b64encode(pickle.dumps(handles)).decode(),
                }
            )
        vllm.finish_weight_update(version)
        if torch.cuda.is_available():
            collect: Callable[[], None] = torch.cuda.ipc_collect
            collect()  # else what was exported is never given back


class NcclCarrier:
    """NCCL, by the trainer's side of vLLM itself: it must be installed beside groupwise."""

    def __init__(self, weights: PolicyWeights) -> None:
        self.weights = weights

    def begin(self, version: str) -> None:
        """Keep nothing: tensors are sent when a server takes them."""

    def carry(self, server: InferenceServer, version: str) -> None:
        vllm = _vllm(server, "nccl")
        try:
            factory = importlib.import_module("vllm.distributed.weight_transfer.factory")
            nccl = importlib.import_module("vllm.distributed.weight_transfer.nccl_engine")
            made, info = factory.WeightTransferTrainerFactory, nccl.NCCLTrainerInitInfo
        except (ImportError, AttributeError) as error:
            raise EngineError(
                f"engine.carrier=nccl sends with vLLM's own trainer side, which is not here "
                f"({error}). Install vllm 0.28 or later in this environment, or set "
                "engine.carrier=folder."
            ) from error
        init = info(
            rank=0,
            master_address=own_address(server.link.url),
            master_port=free_port(),
            world_size=1 + vllm.world_size(),
        )
        sender = made.trainer_init(init, client=vllm, source=TensorSource(self.weights))
        try:
            sender.send_weights()
        finally:
            sender.shutdown()
        vllm.says(version)


@dataclass(frozen=True)
class DescribedTensor:
    """A tensor as vLLM's `metadata()` describes it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class TensorSource:
    """The weights as vLLM's trainer side reads them: what comes, then the tensors themselves."""

    def __init__(self, weights: PolicyWeights) -> None:
        self.weights = weights

    def metadata(self) -> list[DescribedTensor]:
        return [
            DescribedTensor(name, tensor.dtype, tuple(tensor.shape))
            for name, tensor in self.weights.tensors()
        ]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self.weights.tensors()

    def held_names(self) -> None:
        """Say that all of them are here."""


def chunks(tensors: Iterator[tuple[str, Tensor]], most: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Yield tensors in their order, as many at a time as `most` bytes hold, or one."""
    held: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in tensors:
        if held and size + tensor.nbytes > most:
            yield held
            held, size = [], 0
        held.append((name, tensor.contiguous()))
        size += tensor.nbytes
    if held:
        yield held


def described(chunk: list[tuple[str, Tensor]]) -> dict[str, Any]:
    """Return names, precisions and shapes as the transfer calls have them."""
    return {
        "names": [name for name, _ in chunk],
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in chunk],
        "shapes": [list(tensor.shape) for _, tensor in chunk],
    }


def free_port() -> int:
    """Return a port that nobody has at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def own_address(url: str) -> str:
    """Return the address under which a server reaches this machine."""
    from urllib.parse import urlsplit

    parts = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((parts.hostname or "127.0.0.1", parts.port or 80))  # sends nothing
        found: str = probe.getsockname()[0]
        return found


def _vllm(server: InferenceServer, carrier: str) -> VllmServer:
    if not isinstance(server, VllmServer):
        raise EngineError(
            f"engine.carrier={carrier} uses vLLM's transfer calls, which {server.kind} has not. "
            "Set engine.carrier=folder."
        )
    return server
