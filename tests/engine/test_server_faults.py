"""Servers that die, hang, lie and come back: no answer is lost, changed or made up."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_zoo import learner_logp
from fake_engine_server import serving
from runs import metrics, quiet, small
from served import SAMPLING, engine, folder, ids, learn, loaded, requests

from groupwise.engine.backends import backend, capabilities_of
from groupwise.engine.servers.launch import Launched, LaunchPlan, gpu_of
from groupwise.errors import ConfigError, EngineError
from groupwise.model.formats.checkpoint import load_weights
from groupwise.runfiles.catalogue import CATALOGUE
from groupwise.stages.checks import check_config
from groupwise.training.loop import train

# What a server does to an answer, and what is said of it.
FAULTS = {
    "die": "can't be reached while writing an answer",
    "fail": "answers 500 while writing an answer: .*EngineDeadError",
    "short": "wrote 1 tokens of 6, and nothing ends an answer there",
    "empty": "wrote 0 tokens where 1 to 6 were asked for",  # trap 24
    "abort": r"broke an answer off \(abort\)",
    "nan": "log-probabilities that are not finite",
    "lengths": "gives 5 log-probabilities for 6 tokens",
    "no_logps": "gives no log-probability for some tokens",
    "beyond": "writes tokens beyond the vocabulary",
}


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers that are out are looked at again soon."""
    monkeypatch.setattr("groupwise.engine.servers.engine.AGAIN", 0.05)


@pytest.fixture(scope="module")
def wanted() -> list[list[tuple[int, ...]]]:
    """What servers that never fail write."""
    with serving(folder()) as server:
        return ids(engine(loaded(), [server]).generate(requests(), SAMPLING))


@pytest.mark.parametrize("fault", FAULTS)
def test_what_a_server_spoils_is_asked_for_again_and_comes_out_the_same(
    fault: str, wanted: Any
) -> None:
    said: list[str] = []
    with serving(folder(), 2) as servers:
        sampler = engine(loaded(), servers, said, slots=2)
        servers[0].faults[fault] = 1
        servers[1].calls.clear()
        groups = sampler.generate(requests(), SAMPLING)
        told = sampler.measures()
    assert ids(groups) == wanted
    assert re.search(FAULTS[fault], said[0]) and servers[0].url in said[0]
    assert said[0].endswith("its unfinished answers go out again")
    assert told["sync/resubmitted"] >= 1


def test_a_server_that_returns_is_synced_and_probed_before_it_serves() -> None:
    """It comes back with the weights that it started with, as a supervisor restarts it."""
    policy, said = loaded(), []
    with serving(folder()) as server:
        sampler = engine(policy, [server], said, slots=4)
        learn(policy)
        sampler.sync(1)
        clean = ids(sampler.generate(requests(), SAMPLING))
        server.faults["hang"] = 1
        tickets = sampler.submit(requests(), SAMPLING)
        while server.faults["hang"]:
            time.sleep(0.01)
        server.stop()
        server.calls.clear()
        server.start()
        found: dict[int, Any] = {}
        while len(found) < len(tickets):
            found.update(sampler.finished())
    assert ids([found[ticket] for ticket in tickets]) == clean
    kinds = [kind(path, body) for path, body in server.calls]
    again = kinds.index("weights")  # a lane that had not failed yet may have asked before
    assert "probe" in kinds[again:]
    assert "answer" not in kinds[again : len(kinds) - kinds[::-1].index("probe")]
    assert said[-1] == f"{server.url} is back, synced and probed"


def kind(path: str, body: Any) -> str:
    """What a call is for."""
    if path == "/v1/completions":
        asked = body["prompt"]
        return "probe" if "prompt_logprobs" in body else "answer" if len(asked) < 8 else "check"
    return "weights" if path == "/collective_rpc" else ""


def test_answers_of_a_server_that_was_replaced_meanwhile_do_not_count() -> None:
    """Without one broken connection, as behind a proxy: nothing but its version tells."""
    policy, said = loaded(), []
    with serving(folder()) as server:
        sampler = engine(policy, [server], said, slots=4)
        learn(policy)
        sampler.sync(1)
        clean = ids(sampler.generate(requests(), SAMPLING))
        server.running.clear()
        tickets = sampler.submit(requests(), SAMPLING)
        while server.busy < 4:
            time.sleep(0.01)
        server.cache.clear()
        server.model, server.version = load_weights(folder()), "default"
        server.running.set()
        found: dict[int, Any] = {}
        while len(found) < len(tickets):
            found.update(sampler.finished())
    assert ids([found[ticket] for ticket in tickets]) == clean
    assert "says that its weights are of version 'default'" in said[0]


@pytest.mark.parametrize("tells", [True, False])
def test_a_restart_between_two_batches_is_noticed(tells: bool) -> None:
    """Nothing failed, and the weights are old: its version tells, or the probe."""
    policy, said = loaded(), []
    with serving(folder()) as server:
        if not tells:
            server.without |= {"/weight_info", "/update_weight_version"}
        sampler = engine(policy, [server], said)
        learn(policy)
        sampler.sync(1)
        server.restart()
        for request, group in zip(asked := requests(2), sampler.generate(asked, SAMPLING),
                                  strict=True):  # fmt: skip
            right = learner_logp(policy.model, request, group[0])
            torch.testing.assert_close(group[0].logp_T, right, rtol=0, atol=1e-5)
    assert re.search("says that its weights are of" if tells else "scores the probe", said[0])


def test_one_that_answers_with_other_weights_on_the_way_is_found_out() -> None:
    """SGLang says with every answer which weights it is of."""
    said: list[str] = []
    with serving(folder(), 2, kind="sglang") as servers:
        sampler = engine(loaded(), servers, said, slots=1)
        wanted = ids(sampler.generate(requests(), SAMPLING))
        servers[1].running.clear()
        tickets = sampler.submit(requests(), SAMPLING)
        servers[1].faults["lies"] = 1000
        servers[1].running.set()
        found: dict[int, Any] = {}
        while len(found) < len(tickets):
            found.update(sampler.finished())
    assert ids([found[ticket] for ticket in tickets]) == wanted
    assert "answers with weights of version 'another'" in said[0]


def test_one_that_hangs_is_given_up_in_time() -> None:
    said: list[str] = []
    with serving(folder(), 2) as servers:
        sampler = engine(loaded(), servers, said, slots=4)
        wanted = ids(sampler.generate(requests(), SAMPLING))
        servers[0].faults["hang"] = True
        for station in sampler.fleet.stations:
            station.server.seconds = 1.0
        assert ids(sampler.generate(requests(), SAMPLING)) == wanted
    assert "gave no answer within 1 s while writing an answer" in said[0]


def test_where_nobody_is_left_the_run_stops_with_the_reasons() -> None:
    """Trap 24: not with empty answers."""
    with serving(folder(), 2) as servers:
        sampler = engine(loaded(), servers, timeout=1.5)
        for server in servers:
            server.faults["die"] = True
            server.without.add("/pause")  # neither can be brought back
        with pytest.raises(EngineError, match=r"lacks /pause|No server has answered for 1\.5 s"):
            sampler.generate(requests(), SAMPLING)
    with pytest.raises(EngineError, match=r"No server has answered for 1\.5 s.*can't be reached"):
        sampler.sync(1)


def test_an_answer_that_always_fails_stops_the_run() -> None:
    with serving(folder()) as server:
        sampler = engine(loaded(), [server], slots=1)
        server.faults["nan"] = True
        with pytest.raises(EngineError, match=r"failed 5 times, last: .* not finite"):
            sampler.generate(requests(1, 1), SAMPLING)
        assert sampler.finished() == []


def test_a_request_that_no_server_can_serve_is_raised_at_once() -> None:
    with serving(folder(), context=64) as server:
        sampler = engine(loaded(), [server])
        long = requests(1, 1)[0]
        with pytest.raises(EngineError, match=r"answers 400 .* maximum context length is 64"):
            sampler.generate([type(long)((1,) * 63, 1, prompt_id=0, draw=0)], SAMPLING)


# --- before anything is loaded --------------------------------------------------------------------


def refused(**engine: Any) -> str:
    with pytest.raises(ConfigError) as why:
        check_config(small(**{f"engine__{name}": value for name, value in engine.items()}))
    return str(why.value)


def test_servers_that_are_not_there_are_refused_first() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        said = refused(backend="vllm", urls=[url])
    assert f"{url} can't be reached while asking what it can do" in said
    assert "VLLM_SERVER_DEV_MODE=1" in said


def test_another_program_at_the_address_is_refused() -> None:
    with serving(folder(), kind="sglang") as server:
        assert "is no vLLM: it lists no call /v1/completions" in refused(
            backend="vllm", urls=[server.url]
        )
        assert "leaves no room for a prompt" not in refused(backend="vllm", urls=[server.url])
    with serving(folder()) as server:
        assert "is no SGLang" in refused(backend="sglang", urls=[server.url])
        server.without |= {"prompt_logprobs", "/pause"}
        assert "lacks /pause, prompt_logprobs. Start it" in refused(
            backend="vllm", urls=[server.url]
        )
        server.without.clear()
        server.context = 4
        assert "holds 4 tokens of a sequence" in refused(backend="vllm", urls=[server.url])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"backend": "vllm"}, "needs servers: give the addresses"),
        ({"backend": "vllm", "urls": ["http://127.0.0.1:1"], "servers": 1}, "one of the two"),
        ({"backend": "vllm", "urls": ["127.0.0.1:1"]}, "is no address of a server"),
        ({"backend": "sglang", "servers": 1, "carrier": "ipc"}, "which sglang has not"),
        ({"backend": "vllm", "command": ["x"]}, "no server is started"),
        ({"backend": "vllm", "servers": 1, "folder": "/no/such"}, "/no/such is no folder here"),
        ({"urls": ["http://127.0.0.1:1"]}, "engine.urls would be ignored"),
        ({"quantization": "fp8"}, "engine.quantization would be ignored"),
        ({"backend": "vllm", "servers": 1, "quantization": "fp8"}, "does not correct for it"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], words: str) -> None:
    assert words in refused(**settings)


def test_rounded_weights_go_with_a_recipe_that_corrects() -> None:
    config = small(recipe="tis", engine__backend="vllm", engine__servers=1,
                   engine__quantization="fp8_per_tensor")  # fmt: skip
    check_config(config)
    assert capabilities_of(config.engine).weights == "vllm:fp8_per_tensor"


# --- servers of the run's own ---------------------------------------------------------------------


def plan(tmp_path: Path, **changes: Any) -> LaunchPlan:
    given: dict[str, Any] = {
        "kind": "vllm", "command": (), "model": tmp_path, "context": 64, "dtype": "float32",
        "rank": 0, "quantization": "", "carrier": "folder",
    }  # fmt: skip
    return LaunchPlan(**(given | changes))


def test_commands_say_all_that_the_run_relies_on(tmp_path: Path) -> None:
    words = plan(tmp_path).words(8123)
    assert words[:5] == [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model",
                         str(tmp_path)]  # fmt: skip
    text = " ".join(words)
    assert "--port 8123 --dtype float32 --max-model-len 64" in text
    assert "--logprobs-mode processed_logprobs" in text and "--generation-config vllm" in text
    assert "lora" not in text and "quantization" not in text
    more = " ".join(plan(tmp_path, rank=16, quantization="fp8", carrier="ipc").words(1))
    assert "--max-lora-rank 16" in more and "--quantization fp8" in more
    assert '--weight-transfer-config {"backend": "ipc"}' in more
    theirs = " ".join(plan(tmp_path, kind="sglang", command=("python", "-m", "x")).words(1))
    assert theirs.startswith("python -m x --model-path")
    assert "--enable-deterministic-inference" in theirs  # else it does not look at seeds
    with pytest.raises(EngineError, match=r"engine\.command has --port"):
        plan(tmp_path, command=("vllm", "--port=80")).words(1)


def test_servers_take_the_last_gpus() -> None:
    assert [gpu_of(n, 1, "") for n in range(2)] == ["", ""]  # one: all share it
    assert [gpu_of(n, 4, "") for n in range(4)] == ["3", "2", "1", "3"]
    assert [gpu_of(n, 4, "5,7,6") for n in range(2)] == ["6", "7"]


def test_one_that_ends_at_once_says_why() -> None:
    command = (sys.executable, "-c", "raise SystemExit('no such wheel')")
    with pytest.raises(EngineError, match=r"ended with status 1 before it was(.|\n)*such wheel"):
        start(command)
    with pytest.raises(EngineError, match="can't start '/no/such/python'"):
        start(("/no/such/python",))


def start(command: tuple[str, ...]) -> None:
    with serving(folder()) as server:
        engine(loaded(), [server], urls=(), servers=1, command=command)


def test_a_server_ends_with_all_that_it_started(tmp_path: Path) -> None:
    code = "import os, sys, time; os.fork(); print(os.getpid(), flush=True); time.sleep(600)"
    server = Launched(plan(tmp_path, command=(sys.executable, "-c", code)), 0, tmp_path / "log", 0)
    server.start()
    while len(pids := server.log.read_text().split()) < 2:
        assert server.ended is None
    server.stop()
    assert server.ended is None  # there is none any more
    for pid in pids:  # SIGKILL takes a moment; its parent may have left it as a zombie
        while (state := state_of(pid)) not in ("", "Z"):
            assert state
            time.sleep(0.01)


@pytest.mark.slow
def test_a_server_ends_when_its_run_is_killed(tmp_path: Path) -> None:
    code = f"""
import sys, time
from pathlib import Path
from groupwise.engine.servers.launch import Launched, LaunchPlan
command = (sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(600)")
place = Path({str(tmp_path)!r})
plan = LaunchPlan("vllm", command, place, 64, "float32", 0, "", "folder")
Launched(plan, 0, place / "log", 0).start()
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", code]) as run:
        log = tmp_path / "log"
        while not (log.exists() and log.read_text()):
            assert run.poll() is None
            time.sleep(0.01)
        run.kill()
    while state_of(log.read_text().strip()) not in ("", "Z"):
        time.sleep(0.01)


def state_of(pid: str) -> str:
    """The letter that Linux has for what a process does; "" where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""


@pytest.mark.slow
def test_a_server_of_our_own_that_is_killed_is_started_again() -> None:
    """The stand-in, in a process of its own."""
    script = Path(__file__).resolve().parents[1] / "support" / "fake_engine_process.py"
    policy, said = loaded(), []
    with serving(folder()) as other:
        wanted = ids(engine(policy, [other]).generate(requests(), SAMPLING))
        sampler = engine(policy, [other], said, urls=(), servers=1, timeout=60.0,
                         command=(sys.executable, str(script)))  # fmt: skip
    assert ids(sampler.generate(requests(), SAMPLING)) == wanted
    (station,) = sampler.fleet.stations
    assert station.launched is not None and station.launched.process is not None
    os.kill(station.launched.process.pid, signal.SIGKILL)
    assert ids(sampler.generate(requests(), SAMPLING)) == wanted
    assert sampler.measures()["sync/restarts"] == 1
    assert any("is back, synced and probed" in text for text in said)


# --- runs -----------------------------------------------------------------------------------------


def rollouts(run: Path) -> list[str]:
    from groupwise.runfiles.rollouts import read

    files = sorted(run.glob("rollouts/step_*.parquet"))
    return [json.dumps(read(file, ["prompt_id", "sample", "token_ids", "version"]).to_pydict())
            for file in files]  # fmt: skip


def test_a_run_by_servers_that_fail_is_the_run_by_those_that_do_not(tmp_path: Path) -> None:
    """Weights are those of every step, so the rollouts of later ones hang on all before them."""
    train(small(steps=1), tmp_path / "start", quiet())
    start = tmp_path / "start" / "cold_start"
    given = {"engine__backend": "vllm", "engine__timeout": 30.0, "steps": 3}
    with serving(start, 2) as servers:
        urls = [each.url for each in servers]
        train(small(**given, engine__urls=urls), tmp_path / "clean", quiet())
    with serving(start, 2) as servers:
        urls = [each.url for each in servers]
        for n, fault in enumerate(("die", "nan", "short", "lengths")):
            servers[n % 2].faults[fault] = 2
        train(small(**given, engine__urls=urls), tmp_path / "spoiled", quiet())
    assert rollouts(tmp_path / "spoiled") == rollouts(tmp_path / "clean")
    lines = metrics(tmp_path / "spoiled")
    assert sum(line["sync/resubmitted"] for line in lines[1:]) >= 4
    assert all(line["mismatch/abs_mean"] < 1e-5 for line in lines[1:])
    told = {name for line in lines for name in line if name.startswith("sync/")}
    assert len(told) == 4 and told <= CATALOGUE.keys()
    events = (tmp_path / "spoiled" / "events.jsonl").read_text()
    assert "its unfinished answers go out again" in events


def test_a_run_goes_on_with_servers_that_hold_other_weights(tmp_path: Path) -> None:
    """It was stopped, they were started anew: the first sync brings what the run has learned."""
    train(small(steps=1), tmp_path / "start", quiet())
    start = tmp_path / "start" / "cold_start"
    given = {"engine__backend": "sglang", "engine__timeout": 30.0}
    with serving(start, kind="sglang") as server:
        train(small(**given, steps=3, engine__urls=[server.url]), tmp_path / "whole", quiet())
    for steps in (1, 3):
        with serving(start, kind="sglang") as server:
            config = small(**given, steps=steps, engine__urls=[server.url])
            train(config, tmp_path / "parts", quiet())
    assert rollouts(tmp_path / "parts") == rollouts(tmp_path / "whole")


def test_both_names_are_engines() -> None:
    for name in ("vllm", "sglang"):
        assert capabilities_of(small(engine__backend=name).engine).weights == name
        assert not backend(name).capabilities.in_flight_updates
