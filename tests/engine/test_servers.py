"""Servers as engines, against a stand-in that speaks their protocols: answers and weights."""

from __future__ import annotations

import base64
import pickle
import sys
import time
import types
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import fake_engine_server as fakes
import pytest
import torch
from engine_zoo import learner_logp
from fake_engine_server import FakeServer, serving
from served import SAMPLING, engine, folder, ids, learn, loaded, requests

from groupwise.engine.protocol import Request, Sampling
from groupwise.engine.servers.carriers import IpcCarrier, chunks
from groupwise.engine.servers.probing import Scores, limit_of
from groupwise.errors import EngineError
from groupwise.model.adapters.lora import adapters

KINDS = ("vllm", "sglang")


@pytest.fixture(params=KINDS)
def server(request: pytest.FixtureRequest) -> Iterator[FakeServer]:
    with serving(folder(), kind=request.param) as made:
        yield made


# --- answers ------------------------------------------------------------------------------------


def test_answers_are_the_policys_with_the_learners_log_probabilities(server: FakeServer) -> None:
    policy, asked = loaded(), requests()
    sampler = engine(policy, [server])
    for temperature in (1.0, 0.6):
        sampling = replace(SAMPLING, temperature=temperature)
        for request, group in zip(asked, sampler.generate(asked, sampling), strict=True):
            assert len(group) == request.samples
            for each in group:
                wanted = learner_logp(policy.model, request, each, temperature)
                torch.testing.assert_close(each.logp_T, wanted, rtol=0, atol=1e-5)
                ended = each.token_ids[-1] in policy.tokenizer.eos_ids
                assert each.finish == ("eos" if ended else "length")
                assert each.weights == server.kind and each.version == 0


def test_each_sample_is_a_request_with_a_seed_of_its_own(server: FakeServer) -> None:
    """Also those of neighbouring prompts: seed+1 of one is not the seed of the next."""
    sampler = engine(loaded(), [server])
    server.calls.clear()
    sampler.generate(requests(6, 3), SAMPLING)
    path = "/v1/completions" if server.kind == "vllm" else "/generate"
    bodies = [b for b in server.asked(path) if "logprobs" in b or "no_stop_trim" in str(b)]
    assert len(bodies) == 18 and all(b.get("n", 1) == 1 for b in bodies)
    seeds = [b["seed"] if "seed" in b else b["sampling_params"]["sampling_seed"] for b in bodies]
    assert len(set(seeds)) == 18
    assert not any(abs(a - b) < 1000 for a in seeds for b in seeds if a != b)


def test_an_answer_that_is_gone_on_with_draws_by_its_place() -> None:
    policy = loaded()
    with serving(folder()) as server:
        sampler = engine(policy, [server])
        whole = Request((5, 6, 7, 8), 1, prompt_id=3, draw=0)
        server.calls.clear()
        sampler.generate([whole, replace(whole, begun=2)], SAMPLING)
        first, second = server.asked("/v1/completions")[-2:]
    assert first["seed"] != second["seed"]
    assert {first["max_tokens"], second["max_tokens"]} == {6, 4}


def test_samples_do_not_depend_on_who_writes_them() -> None:
    policy, asked = loaded(), requests(5, 3)
    with serving(folder()) as alone, serving(folder(), 3) as several:
        wanted = engine(policy, [alone]).generate(asked, SAMPLING)
        sampler = engine(policy, several)
        assert ids(sampler.generate(asked, SAMPLING)) == ids(wanted)
        assert ids(sampler.generate(asked[::-1], SAMPLING)) == ids(wanted[::-1])
        assert all(each.asked("/v1/completions") for each in several)


def test_hundreds_of_requests_are_under_way_at_the_same_time() -> None:
    with serving(folder()) as server:
        sampler = engine(loaded(), [server], slots=200)
        server.running.clear()  # until it is told to go on, all that came lies with it
        tickets = sampler.submit(requests(75, 3), Sampling(max_tokens=1))
        while server.busy < 200:
            time.sleep(0.01)
        server.running.set()
        found: dict[int, Any] = {}
        while len(found) < len(tickets):
            found.update(sampler.finished())
        assert server.peak == 200 and sorted(found) == tickets


def test_stop_strings_end_an_answer_where_the_engine_finds_them(server: FakeServer) -> None:
    """The stand-in looks at none of them, so it writes on: what comes behind is cut."""
    policy = loaded()
    sampler = engine(policy, [server])
    (free,) = sampler.generate(requests(1, 1), SAMPLING)
    text = policy.tokenizer.decode(free[0].token_ids)
    stop = replace(SAMPLING, stop=(text[2],))
    (group,) = sampler.generate(requests(1, 1), stop)
    assert group[0].finish == "stop"
    assert group[0].token_ids == free[0].token_ids[: text.index(text[2]) + 1]
    assert len(group[0].logp_T) == len(group[0].token_ids)


def test_what_is_cancelled_never_comes_and_new_weights_need_not_wait(server: FakeServer) -> None:
    policy, asked = loaded(), requests(4, 2)
    sampler = engine(policy, [server])
    wanted = sampler.generate(asked, SAMPLING)
    server.running.clear()
    tickets = sampler.submit(asked, SAMPLING)
    with pytest.raises(EngineError, match="4 requests are under way"):
        sampler.sync(1)
    sampler.cancel(tickets[1:])
    server.running.set()
    ((ticket, group),) = sampler.finished()
    assert ticket == tickets[0] and ids([group]) == ids(wanted[:1])
    assert sampler.finished() == []
    sampler.sync(1)


def test_defaults_of_a_models_folder_can_not_change_the_distribution() -> None:
    with serving(folder()) as server:
        sampler = engine(loaded(), [server])
        sampler.generate(requests(1, 1), SAMPLING)
        body = server.asked("/v1/completions")[-1]
    said = {name: body[name] for name in ("temperature", "top_p", "top_k", "min_p",
            "repetition_penalty", "presence_penalty", "frequency_penalty")}  # fmt: skip
    assert list(said.values()) == [1.0, 1.0, 0, 0.0, 1.0, 0.0, 0.0]


# --- weights ------------------------------------------------------------------------------------


def test_new_weights_sample_and_are_probed(server: FakeServer) -> None:
    policy, asked = loaded(), requests()
    sampler = engine(policy, [server])
    before = sampler.generate(asked, SAMPLING)
    for version in (1, 2):
        learn(policy, 0.05 * version)
        sampler.sync(version)
        for request, group in zip(asked, sampler.generate(asked, SAMPLING), strict=True):
            for each in group:
                wanted = learner_logp(policy.model, request, each)
                torch.testing.assert_close(each.logp_T, wanted, rtol=0, atol=1e-5)
                assert each.version == version
    assert ids(sampler.generate(asked, SAMPLING)) != ids(before)
    told = sampler.measures()
    assert told["sync/probe_mean"] < 1e-5 and told["sync/probe_max"] < 1e-4
    assert told["time/sync"] > 0 and told["sync/restarts"] == told["sync/resubmitted"] == 0
    assert "sync/probe_mean" not in sampler.measures()  # since the last call: nothing


def test_every_version_has_a_cache_of_its_own(server: FakeServer) -> None:
    sampler = engine(loaded(), [server])
    salts = []
    for version in (0, 1):
        if version:
            sampler.sync(1)
        sampler.generate(requests(2, 1), SAMPLING)
        path = "/v1/completions" if server.kind == "vllm" else "/generate"
        body = server.asked(path)[-1]
        salts.append(body.get("cache_salt", body.get("extra_key")))
    other = engine(loaded(), [server]).version
    assert len({*salts, other}) == 3  # nor that of another run's engine on the same server


def test_weights_are_taken_while_nobody_writes_and_the_cache_is_cleared() -> None:
    with serving(folder()) as server:
        sampler = engine(loaded(), [server])
        server.calls.clear()
        sampler.sync(1)
        order = [path for path, _ in server.calls]
    wanted = ["/openapi.json", "/v1/models", "/pause", "/collective_rpc",
              "/update_weight_version", "/resume", "/reset_prefix_cache", "/weight_info",
              "/v1/completions"]  # fmt: skip
    assert list(dict.fromkeys(order)) == wanted


# Traps 13 to 17, 2 and 3: what goes wrong between two sets of weights, and what is said of it.
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("stale", "did not arrive.*digit for digit"),  # 13, 15: the old weights again
        ("tied_head", "does not compute the learner's policy.*tied to the embedding"),  # 15
        ("half", "does not compute the learner's policy.*taken by half"),  # 2, 16
        ("rounds", "does not compute the learner's policy.*engine.quantization"),
        ("load_fails", "answers 500 while reading weights"),  # 2: a status that nobody reads
        ("nan_score", "0 of them finite: its weights hold NaN"),  # 14: garbage behind a sleep
        ("lies", "took the weights of version .* says that it has 'another'"),
    ],
)
def test_weights_that_did_not_arrive_as_they_are_stop_the_run(
    server: FakeServer, fault: str, words: str
) -> None:
    policy = loaded()
    sampler = engine(policy, [server])
    learn(policy)
    server.faults[fault] = True
    with pytest.raises(EngineError, match=words) as why:
        sampler.sync(1)
    assert server.url in str(why.value)
    assert sampler.number == 0  # 3: the version is not raised by what did not arrive
    with pytest.raises(EngineError, match="sync them first"):
        sampler.submit(requests(1, 1), SAMPLING)
    server.faults.clear()
    sampler.sync(1)  # whole again, whatever was left half done
    assert sampler.number == 1
    sampler.generate(requests(1, 1), SAMPLING)


def test_weights_that_moved_by_next_to_nothing_and_stayed_behind_are_seen() -> None:
    """A step of 1e-6 is far below what rounding may make: standing still gives it away."""
    policy = loaded()
    with serving(folder()) as server:
        sampler = engine(policy, [server])
        learn(policy, 2e-5)
        server.faults["stale"] = True
        with pytest.raises(EngineError, match="did not arrive"):
            sampler.sync(1)


def test_a_prompt_cache_that_outlives_weights_is_seen() -> None:
    """Trap 17. Only without salts: with them, what an earlier version computed is not found."""
    policy, asked = loaded(), requests(2, 1)
    with serving(folder()) as server:
        server.faults["keeps_cache"] = True
        salted = engine(policy, [server])
        salted.generate(asked, SAMPLING)
        learn(policy)
        salted.sync(1)
        (request, _), (group, _) = asked, salted.generate(asked, SAMPLING)
        wanted = learner_logp(policy.model, request, group[0])
        torch.testing.assert_close(group[0].logp_T, wanted, rtol=0, atol=1e-5)

        server.without.add("cache_salt")
        bare = engine(policy, [server])
        learn(policy, 0.06)
        with pytest.raises(EngineError, match="cache of prompts"):
            bare.sync(1)


def test_raw_log_probabilities_are_refused(server: FakeServer) -> None:
    """Trap 18: those of before the temperature."""
    server.faults["raw"] = True
    with pytest.raises(EngineError, match="of before the temperature"):
        engine(loaded(), [server])


def test_another_vocabulary_is_refused(server: FakeServer) -> None:
    policy = loaded()
    object.__setattr__(policy.model.config, "vocab_size", 120)
    with pytest.raises(EngineError, match="120 tokens: the server serves another one"):
        engine(policy, [server])
    assert not any("weights" in path or "rpc" in path for path, _ in server.calls)


def test_an_engine_that_rounds_may_where_the_run_says_so(server: FakeServer) -> None:
    policy = loaded()
    server.faults["rounds"] = True
    sampler = engine(policy, [server], quantization="int8")
    assert sampler.capabilities.weights == f"{server.kind}:int8"
    learn(policy)
    sampler.sync(1)
    (group,) = sampler.generate(requests(1, 1), SAMPLING)
    assert group[0].weights == f"{server.kind}:int8"
    assert sampler.measures()["sync/probe_mean"] > 1e-4


def test_the_limit_is_what_was_measured_at_the_first_sync() -> None:
    def scores(gap: float) -> Scores:
        return Scores(torch.zeros(4), torch.full((4,), gap))

    assert limit_of(torch.bfloat16, False, None) == 0.2
    assert limit_of(torch.bfloat16, False, scores(0.03)) == pytest.approx(0.12)
    assert limit_of(torch.bfloat16, False, scores(1e-4)) == 0.02
    assert limit_of(torch.bfloat16, False, scores(0.1)) == 0.2
    assert limit_of(torch.float32, True, scores(1e-6)) == 1.0


# --- other ways of weights ----------------------------------------------------------------------


@pytest.mark.parametrize("older", [False, True])
def test_transfer_calls_hand_over_chunks_by_handle(
    older: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As CUDA IPC, with handles on tensors of this process in place of a GPU's."""
    policy = loaded()
    monkeypatch.setattr(fakes, "HANDED", {})

    def handle(tensor: torch.Tensor) -> Any:
        fakes.HANDED[name := f"tensor {len(fakes.HANDED)}"] = tensor
        return {"a GPU": (name,)}

    with serving(folder()) as server:
        if older:
            server.faults["older"] = True
            server.without |= {"/weight_info", "/update_weight_version"}
        sampler = engine(policy, [server])
        sampler.delivery.carrier = IpcCarrier(sampler.weights, handle)
        monkeypatch.setattr("groupwise.engine.servers.carriers.CHUNK", 1)
        learn(policy)
        sampler.sync(1)
        begun = server.asked("/start_weight_update")
        assert begun == [{"is_checkpoint_format": True} if older else None]
        (body,) = server.asked("/finish_weight_update")
        assert body == {"weight_version": sampler.version}
        names = [n for b in server.asked("/update_weights") for n in b["update_info"]["names"]]
        assert names == [name for name, _ in sampler.weights.tensors()]
        assert sampler.measures()["sync/probe_mean"] < 1e-5
        handed = server.asked("/update_weights")[0]["update_info"]["ipc_handles_pickled"]
        assert pickle.loads(base64.b64decode(handed)) == [{"a GPU": ("tensor 0",)}]


def test_chunks_hold_as_much_as_they_may() -> None:
    rows = [(str(n), torch.zeros(n)) for n in (1, 2, 3, 9, 1)]
    sizes = [[name for name, _ in chunk] for chunk in chunks(iter(rows), 4 * 4)]
    assert sizes == [["1", "2"], ["3"], ["9"], ["1"]]


def test_tensors_on_a_cpu_have_no_cuda_handle() -> None:
    with serving(folder()) as server, pytest.raises(EngineError, match=r"engine\.carrier=folder"):
        engine(loaded(), [server], carrier="ipc")


def test_nccl_asks_for_vllms_own_side(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(folder()) as server:
        for name in ("factory", "nccl_engine"):
            monkeypatch.setitem(sys.modules, f"vllm.distributed.weight_transfer.{name}", None)
        with pytest.raises(EngineError, match=r"Install vllm 0\.28 or later"):
            engine(loaded(), [server], carrier="nccl")


def test_nccl_sends_by_vllms_own_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in of that side, which sends by handles: its calls and what it is told are right."""
    monkeypatch.setattr(fakes, "HANDED", {})
    seen: dict[str, Any] = {}

    class Sender:
        def __init__(self, client: Any, source: Any) -> None:
            self.client, self.source = client, source

        def send_weights(self) -> None:
            said = [(x.name, x.dtype, x.shape) for x in self.source.metadata()]
            sent = list(self.source)
            assert said == [(name, x.dtype, tuple(x.shape)) for name, x in sent]
            fakes.HANDED.update(sent)
            handles = base64.b64encode(pickle.dumps([{"": (name,)} for name, _ in sent])).decode()
            self.client.start_weight_update()
            self.client.update_weights(
                {
                    "names": [name for name, _ in sent],
                    "shapes": [list(x.shape) for _, x in sent],
                    "ipc_handles_pickled": handles,
                }
            )
            self.client.finish_weight_update()

        def shutdown(self) -> None:
            seen["over"] = True

    class Factory:
        @classmethod
        def trainer_init(cls, init: Any, *, client: Any, source: Any) -> Sender:
            seen["init"] = init
            client.init_weight_transfer_engine({"world_size": init["world_size"]})
            return Sender(client, source)

    given = {
        "factory": {"WeightTransferTrainerFactory": Factory},
        "nccl_engine": {"NCCLTrainerInitInfo": dict},
    }
    for name, members in given.items():
        module = types.ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, f"vllm.distributed.weight_transfer.{name}", module)
    policy = loaded()
    with serving(folder()) as server:
        sampler = engine(policy, [server], carrier="nccl")
        learn(policy)
        sampler.sync(1)
        assert seen["init"] | {"master_port": 0} == {
            "rank": 0, "master_address": "127.0.0.1", "master_port": 0, "world_size": 2
        }  # fmt: skip
        assert seen["over"] and sampler.measures()["sync/probe_mean"] < 1e-5


# --- adapters -----------------------------------------------------------------------------------


def test_an_adapter_is_swapped_and_its_base_stays(server: FakeServer) -> None:
    """Trap 22: the old one goes when the new one is there, and nobody samples from it."""
    policy = loaded(adapted=True)
    server.adapters = True
    sampler = engine(policy, [server])
    base = server.model
    for version in (1, 2):
        with torch.no_grad():
            for adapter in adapters(policy.model).values():
                adapter.lora_B.add_(0.2)
        server.calls.clear()
        sampler.sync(version)
        for request, group in zip(asked := requests(2), sampler.generate(asked, SAMPLING),
                                  strict=True):  # fmt: skip
            wanted = learner_logp(policy.model, request, group[0])
            torch.testing.assert_close(group[0].logp_T, wanted, rtol=0, atol=1e-5)
    assert server.model is base and len(server.adapted) == 1
    order = [path for path, _ in server.calls if "lora" in path or "pause" in path]
    assert order[0] in ("/pause", "/pause_generation")
    assert order[-1] == ("/v1/load_lora_adapter" if server.kind == "vllm"
                         else "/unload_lora_adapter")  # fmt: skip


def test_an_adapter_is_folded_in_where_a_server_takes_none(server: FakeServer) -> None:
    policy = loaded(adapted=True)
    sampler = engine(policy, [server])
    with torch.no_grad():
        for adapter in adapters(policy.model).values():
            adapter.lora_B.add_(0.2)
    sampler.sync(1)
    assert sampler.measures()["sync/probe_mean"] < 1e-5
    request = requests(1, 1)[0]
    ((each,),) = sampler.generate([request], Sampling(max_tokens=3))
    wanted = learner_logp(policy.model, request, each)
    torch.testing.assert_close(each.logp_T, wanted, rtol=0, atol=1e-4)
