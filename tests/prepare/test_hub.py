"""Models and data by their id, from a hub on this machine: fetched, kept, pinned, refused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from family_zoo import folder
from hub_server import Hub, serving
from model_zoo import CONFIGS, make
from runs import quiet, small
from task_files import read

from groupwise import hub as fetching
from groupwise.data.files import files_of
from groupwise.errors import DataError, ModelError
from groupwise.evaluate.evaluate import evaluate_path
from groupwise.model.adapters.peft_files import BASE, CONFIG
from groupwise.model.formats.checkpoint import load, load_weights, save
from groupwise.model.formats.tokenizer import character_files
from groupwise.model.policy import load_policy
from groupwise.sync.export import export
from groupwise.training.loop import train

ALPHABET = "0123456789+-=? "


def model_files(tmp_path: Path, seed: int = 0) -> dict[str, bytes]:
    """A small Qwen3 and its tokenizer, with what nobody should fetch beside it."""
    from groupwise.model.config import ModelConfig
    from groupwise.model.layers.transformer import Transformer

    files = character_files(ALPHABET)
    shape = ModelConfig.from_hf(CONFIGS["qwen3"] | {"vocab_size": len(ALPHABET) + 1})
    model = Transformer(shape).initialise(torch.Generator().manual_seed(seed))
    path = tmp_path / f"model_{seed}"
    save(model, path, files, shard_bytes=60_000)
    found = {file.name: file.read_bytes() for file in path.iterdir()}
    assert sum(name.endswith(".safetensors") for name in found) > 1
    return found | {
        "pytorch_model.bin": b"a pickle",
        "README.md": b"# words",
        "original/model.safetensors": b"the same again",
    }


ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(5) for b in range(5)]
JSONL = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """With an empty cache of its own."""
    with serving() as found:
        point_at(found.url, tmp_path / "cache", monkeypatch)
        yield found


def point_at(url: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What HF_ENDPOINT and HF_HUB_CACHE do, which are read once a process."""
    from huggingface_hub import constants

    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    forget()


def forget() -> None:
    """As a new process would."""
    fetching.fetch_model.cache_clear()
    fetching.fetch_adapter.cache_clear()
    fetching.fetch_data.cache_clear()


def test_a_model_is_fetched_once_and_then_comes_from_the_cache(hub: Hub, tmp_path: Path) -> None:
    files = model_files(tmp_path)
    commit = hub.model("org/small").push(files)
    first = load("org/small")
    expected = load(tmp_path / "model_0")
    for key, tensor in expected.model.state_dict().items():
        assert torch.equal(tensor, first.model.state_dict()[key])
    assert first.tokenizer.encode("12+3=") == expected.tokenizer.encode("12+3=")
    wanted = {name for name in files if name.endswith((".safetensors", ".json"))}
    assert hub.fetched() == wanted - {"original/model.safetensors"}  # no pickles, nothing twice
    assert fetching.fetch_model("org/small").commit == commit
    forget()
    hub.asked.clear()
    load("org/small")
    assert not hub.fetched()  # the name is looked up, its files are there


def test_the_cache_serves_while_the_hub_is_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving() as hub:
        point_at(hub.url, tmp_path / "cache", monkeypatch)
        commit = hub.model("org/small").push(model_files(tmp_path))
        load_weights("org/small")
    forget()
    load_weights("org/small")
    assert fetching.fetch_model("org/small").commit == commit
    with pytest.raises(ModelError, match=r"org/other can't be fetched: .* does not answer"):
        load_weights("org/other")
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    forget()
    load_weights("org/small")
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE is set, and org/other is not whole"):
        load_weights("org/other")


def test_a_revision_is_a_branch_a_tag_or_a_commit(hub: Hub, tmp_path: Path) -> None:
    repository = hub.model("org/small")
    old = repository.push(model_files(tmp_path, seed=1))
    new = repository.push(model_files(tmp_path, seed=2))
    repository.branches["v1"] = old
    assert fetching.fetch_model("org/small").commit == new
    for revision in ("v1", old):
        assert fetching.fetch_model(f"org/small@{revision}").commit == old
    stored = load_weights(tmp_path / "model_1").state_dict()
    pinned = load_weights("org/small@v1").state_dict()
    assert all(torch.equal(pinned[key], stored[key]) for key in stored)
    with pytest.raises(ModelError, match=r"org/small@v9: the model is there, this revision is not"):
        load_weights("org/small@v9")


def test_gated_missing_and_empty_repositories_are_told_apart(hub: Hub) -> None:
    hub.model("org/gated").push({"config.json": b"{}"})
    hub.gated.add("models/org/gated")
    with pytest.raises(ModelError, match=r"org/gated is gated: .*hf auth login"):
        load_weights("org/gated")
    with pytest.raises(ModelError, match=r"There is no model org/nothing on .*folder was meant"):
        load_weights("org/nothing")
    hub.model("org/empty").push({"README.md": b"words"})
    with pytest.raises(ModelError, match=r"org/empty has no config\.json"):
        load_weights("org/empty")
    hub.model("org/pickled").push({"config.json": b"{}", "pytorch_model.bin": b"a pickle"})
    with pytest.raises(ModelError, match="Pickled weights are never fetched"):
        load_weights("org/pickled")
    assert "pytorch_model.bin" not in hub.fetched()


def test_a_download_that_is_cut_short_is_said_and_done_again(hub: Hub, tmp_path: Path) -> None:
    files = model_files(tmp_path)
    hub.model("org/small").push(files)
    shard = max(name for name in files if name.startswith("model-"))
    hub.cut.add(shard)
    with pytest.raises(ModelError, match=r"org/small was not fetched whole .*again"):
        load_weights("org/small")
    hub.cut.clear()
    load_weights("org/small")


def test_a_folder_wins_over_an_id(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save(make("qwen3"), tmp_path / "org" / "small", {})
    hub.model("org/small").push(model_files(tmp_path, seed=3))
    assert load_weights("org/small").config.vocab_size == 97
    assert not hub.asked


def test_without_the_library_the_command_that_installs_it_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    forget()
    with pytest.raises(ModelError, match=r"pip install .*huggingface_hub"):
        load_weights("org/small")


def test_data_by_pattern_by_default_and_behind_a_sets_name(hub: Hub) -> None:
    commit = hub.data("org/sums").push(
        {
            "main/train-00000.jsonl": JSONL,
            "main/test-00000.jsonl": JSONL[:100],
            "README.md": b"words",
        }
    )
    for name in ("hub:org/sums", f"hub:org/sums@{commit}", "hub:org/sums/main/train*.jsonl"):
        forget()
        assert [task.answer for task in read(name).tasks] == [row["answer"] for row in ROWS]
    assert hub.fetched() == {"main/train-00000.jsonl"}
    (test,) = files_of("hub:org/sums/main/test*")
    assert test.read_bytes() == JSONL[:100]
    assert fetching.fetch_data("hub:org/sums").commit == commit
    from groupwise.config import Data
    from groupwise.data import load as load_data

    row = {"question": "What is 1+1?", "answer": "two #### 2"}
    hub.data("org/gsm").push({"train.jsonl": json.dumps(row).encode()})
    (task,) = load_data(Data(train="gsm8k:hub:org/gsm"), seed=0, held_out=0).train
    assert (task.prompt, task.answer) == ("What is 1+1?", "2")


def test_suites_come_from_a_hub_by_their_names(hub: Hub) -> None:
    """In the files and columns of their usual copies; nothing else of them is fetched."""
    from groupwise.config import load as load_config
    from groupwise.evaluate.request import Basis, EvalRequest, entries

    def table(**columns: Any) -> bytes:
        import pyarrow as pa
        import pyarrow.parquet as pq

        with pa.BufferOutputStream() as out:
            pq.write_table(pa.table({name: [x] for name, x in columns.items()}), out)
            return bytes(out.getvalue())

    math = table(problem="P?", solution="\\boxed{7}", level="Level 1", type="Algebra")
    program = "def f():\n    return 7\n"
    files = {
        "gsm8k": ("openai/gsm8k", "main/test-00000-of-00001.parquet",
                  table(question="P?", answer="so #### 7")),
        "math": ("EleutherAI/hendrycks_math", "algebra/test-00000-of-00001.parquet", math),
        "math500": ("HuggingFaceH4/MATH-500", "test.jsonl",
                    b'{"problem": "P?", "solution": "", "answer": "7", "unique_id": "x"}'),
        "aime": ("AI-MO/aimo-validation-aime", "data/train-00000-of-00001.parquet",
                 table(problem="P?", answer="7")),
        "aime24": ("HuggingFaceH4/aime_2024", "data/train-00000-of-00001.parquet",
                   table(problem="P?", answer="007")),
        "aime25": ("opencompass/AIME2025", "aime2025-I.jsonl",
                   b'{"question": "P?", "answer": "7"}'),
        "mbpp": ("google-research-datasets/mbpp", "full/test-00000-of-00001.parquet",
                 table(text="P?", code=program, test_list=["assert f() == 7"], test_setup_code="")),
        "humaneval": ("openai/openai_humaneval", "openai_humaneval/test-00000-of-00001.parquet",
                      table(prompt="def f():\n", entry_point="f",
                            canonical_solution="    return 7\n",
                            test="def check(f):\n    assert f() == 7\n")),
    }  # fmt: skip
    for repository, name, content in files.values():
        other = name.replace("test", "other") if "test" in name else "README.md"
        hub.data(repository).push({name: content, other: b"not asked for"})
    found = entries(list(files), None, Basis(load_config()), EvalRequest())
    answers = {entry.suite.name: entry.tasks[0].answer for entry in found}
    programs = {"mbpp": program, "humaneval": "    return 7\n"}
    assert answers == {name: programs.get(name, "7") for name in files}
    assert hub.fetched() == {name for _, name, _ in files.values()}


def test_data_that_is_ambiguous_or_not_there_is_named(hub: Hub) -> None:
    hub.data("org/two").push({"a/train.jsonl": JSONL, "b/train.jsonl": JSONL})
    with pytest.raises(DataError, match=r"several sets.*hub:org/two/a/\*train\*\.jsonl"):
        read("hub:org/two")
    with pytest.raises(DataError, match="no file that fits 'c/"):
        read("hub:org/two/c/*.jsonl")
    with pytest.raises(DataError, match="There is no dataset org/three"):
        read("hub:org/three")
    with pytest.raises(DataError, match="names no data set on a hub"):
        read("hub:three")
    hub.gated.add("datasets/org/two")
    with pytest.raises(DataError, match=r"is gated: .*/datasets/org/two"):
        read("hub:org/two@v7")


def test_a_run_from_a_hub_records_its_commits_and_goes_on_with_them(
    hub: Hub, tmp_path: Path
) -> None:
    repository = hub.model("org/small")
    commit = repository.push(model_files(tmp_path))
    data = hub.data("org/sums").push({"train.jsonl": JSONL})
    settings: dict[str, Any] = {
        "model__path": "org/small",
        "data__train": "hub:org/sums",
        "data__options": {},
        "eval__tasks": 0,
    }
    config = small(**settings, steps=1)
    train(config, tmp_path / "run", quiet())
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["hub"] == {
        "model.path": f"org/small@{commit}",
        "data.train hub:org/sums": f"org/sums@{data}",
    }
    repository.push(model_files(tmp_path, seed=5))  # the branch moves on; the run does not
    forget()
    summary = train(small(**settings, steps=2), tmp_path / "run", quiet())
    assert summary["steps"] == 2
    again = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert again["hub"]["model.path"] == f"org/small@{commit}"


def test_an_adapter_on_a_model_from_a_hub_is_resumed_exported_and_evaluated(
    hub: Hub, tmp_path: Path
) -> None:
    repository = hub.model("org/small")
    commit = repository.push(model_files(tmp_path))
    settings: dict[str, Any] = {"model__path": "org/small@main", "adapter__rank": 2}
    run = tmp_path / "run"
    train(small(**settings, steps=1), run, quiet())
    repository.push(model_files(tmp_path, seed=5))
    forget()
    assert train(small(**settings, steps=2), run, quiet())["steps"] == 2, "of the same commit"
    latest = (run / "checkpoints" / "latest").resolve()
    assert json.loads((latest / BASE).read_text())["path"] == f"org/small@{commit}"
    raw = json.loads((latest / CONFIG).read_text())
    assert (raw["base_model_name_or_path"], raw["revision"]) == ("org/small", commit)
    forget()
    assert export(latest, tmp_path / "whole").max < 1e-4
    assert export(latest, tmp_path / "alone", adapter=True).max == 0.0
    (tmp_path / "alone" / BASE).unlink()  # as any adapter of PEFT's
    load_policy(tmp_path / "alone")
    config = small(**settings)
    found = [evaluate_path(x, config).examples for x in (run, "org/small")]
    assert all(found)
    del hub.repositories["models/org/small"]
    shutil.rmtree(tmp_path / "cache")
    forget()
    with pytest.raises(ModelError, match=r"There is no model org/small@.*--base FOLDER"):
        load_policy(latest)


def test_adapters_come_from_a_hub_too_and_stay_at_their_commits(hub: Hub, tmp_path: Path) -> None:
    hub.model("org/small").push(model_files(tmp_path))
    train(small(model__path="org/small", adapter__rank=2, steps=1), tmp_path / "sft", quiet())
    latest = tmp_path / "sft" / "checkpoints" / "latest"
    files = {file.name: file.read_bytes() for file in latest.iterdir() if file.is_file()}
    commit = hub.model("org/sft").push(files)
    settings: dict[str, Any] = {"model__path": "org/small", "adapter__path": "org/sft"}
    run = tmp_path / "run"
    train(small(**settings, steps=1), run, quiet())
    raw = json.loads(files["adapter_config.json"])
    changed = {"adapter_config.json": json.dumps(raw | {"lora_alpha": 1}).encode()}
    hub.model("org/sft").push(files | changed)
    forget()
    train(small(**settings, steps=2), run, quiet())
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["hub"]["adapter.path"] == f"org/sft@{commit}"
    folded = small(model__path="org/small", model__adapters=["org/sft@main"], steps=1)
    train(folded, tmp_path / "folded", quiet())
    manifest = json.loads((tmp_path / "folded" / "manifest.json").read_text())
    assert manifest["hub"]["model.adapters org/sft@main"].startswith("org/sft@")
    with pytest.raises(ModelError, match=r"org/small has no adapter_config\.json"):
        fetching.local_adapter("org/small")


def test_a_path_is_never_taken_for_an_id(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.model("org/small").push(model_files(tmp_path))
    monkeypatch.chdir(tmp_path)
    for path in ("./org/small", "org//small", Path("org/small"), "org/small/"):
        with pytest.raises(ModelError, match="is no folder here"):
            load(path)
    assert not hub.asked
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load_weights("~/model_0").config.family == "qwen3"


def test_another_architecture_comes_from_a_hub_as_well(hub: Hub) -> None:
    files = {file.name: file.read_bytes() for file in folder("gpt2").iterdir()}
    hub.model("openai-community/gpt2").push(files)
    assert load_weights("openai-community/gpt2").config.family == "gpt2"


def test_the_environment_is_honoured(tmp_path: Path) -> None:
    """HF_ENDPOINT and HF_HOME, in a process of its own; the weights are not fetched for sizes."""
    code = (
        "from groupwise.hub import fetch_model, fetch_data\n"
        "print(fetch_model('org/small', weights=False).path)\n"
        "print(fetch_data('hub:org/sums').commit)\n"
    )
    with serving() as hub:
        hub.model("org/small").push(model_files(tmp_path))
        data = hub.data("org/sums").push({"train.jsonl": JSONL})
        environment = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
        environment |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
        environment["PYTHONPATH"] = str(Path(__file__).parents[2])
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        path, commit = done.stdout.splitlines()
        assert path.startswith(str(tmp_path / "home")) and commit == data
        assert not any(name.endswith(".safetensors") for name in hub.fetched())
