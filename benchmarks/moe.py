"""A mixture of experts at one GPU's limit, beside transformers in the same process, as JSON lines.

    python benchmarks/moe.py          1.0B parameters, 0.28B of them for a token, random weights
    python benchmarks/moe.py --tiny   the same in miniature on a CPU, to rehearse it

First both must say the same of the same tokens. Then rollouts (every completion of full length,
here with the log-probabilities of its tokens, there without) and whole updates on as many
completions (here with float32 masters and moments and a prompt computed once for its group, there
AdamW on the weights as they are). transformers runs with `experts_implementation="grouped_mm"`, its
own attention in one kernel, and in the best of several micro-batches.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gpu
import shapes
import torch
import torch.nn.functional as F
from torch import Tensor

from groupwise.config import Config
from groupwise.engine.protocol import Request
from groupwise.model.cost import active_parameters, parameters
from groupwise.model.formats.checkpoint import Loaded
from groupwise.model.layers.attention import packed_positions
from groupwise.model.layers.head import HeadQuery
from groupwise.model.layers.routes import Routes
from groupwise.model.layers.transformer import Policy
from groupwise.prepare.engines import judge_of
from groupwise.prepare.setup import sampling_of, set_up

Row = dict[str, Any]
GOALS = {"rollout": 3.0, "update": 1.5}  # times as many tokens a second as transformers
ROWS, LENGTH = 8, 64  # of the tokens that both score
# The largest mean difference of log-probabilities: in bfloat16 a token's route may turn at a tie.
MOST_APART = {"float32": 1e-4, "bfloat16": 0.05}
MICRO_ROWS = (16, 32, 64)  # of a micro-batch in transformers; the fastest counts


def main(arguments: list[str] | None = None) -> int:
    given = parser().parse_args(arguments)
    if given.tiny:
        small = {"device": "cpu", "dtype": "float32", "shape": "moe_tiny", "prompts": 2, "group": 2}
        vars(given).update(small, prompt_tokens=12, tokens=8, repeats=1)
    given.set = []
    missed = []
    for row in rows(given):
        print(json.dumps(row), flush=True)
        missed += [row["phase"]] if row.get("reached") is False else []
    if missed and not given.tiny:
        print(f"goals missed: {', '.join(missed)}", file=sys.stderr)
    return 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    made.add_argument("--tiny", action="store_true", help="in miniature, on a CPU")
    made.add_argument("--shape", default="moe", choices=list(shapes.SHAPES))
    made.add_argument("--device", default="cuda")
    made.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    for name, usual in (("prompts", 64), ("group", 8), ("prompt-tokens", 128), ("tokens", 256)):
        made.add_argument(f"--{name}", type=int, default=usual)
    made.add_argument("--repeats", type=int, default=2, help="after a first one that warms up")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--no-peer", action="store_true", help="without transformers")
    made.add_argument("--exact", action="store_true", help="engine.exact=true")
    return made


def rows(given: argparse.Namespace) -> Iterator[Row]:
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        texts = shapes.prompts(given.prompts, given.prompt_tokens, given.seed)
        overrides = ["engine.exact=true"] if given.exact else []
        data = gpu.data_file(Path(scratch), texts)
        config = shapes.case(given, overrides, data, given.group, given.tokens)
        dtype = getattr(torch, given.dtype)
        setup = set_up(
            config, lambda *_: shapes.policy(given.shape, dtype, given.device, given.seed)
        )
        loaded, tasks = setup.loaded, setup.tasks
        yield about(given, loaded, setup.notes)
        theirs = None if given.no_peer else peer(loaded, given)
        if theirs is not None:
            yield agreement(loaded.model, theirs, given)
        yield mismatch(given, config, loaded, tasks)
        now = partial(gpu.now, given.device)
        ours = {
            "rollout": partial(gpu.full_length, given, config, loaded, tasks),
            "rollout, routes recorded": partial(recorded, given, config, loaded, tasks),
            "update": partial(shapes.learn, config, loaded, tasks, given.repeats, now),
        }
        found: dict[str, Row] = {}
        for phase, measure in ours.items():
            shapes.give_back(given.device)
            found[phase] = measure()
            yield {"phase": phase, "who": "groupwise", **found[phase]}
        if theirs is None:
            return
        for phase, measured in their_rows(given, theirs).items():
            shapes.give_back(given.device)
            row = measured()
            yield {"phase": phase, "who": "transformers", **row}
            yield ratio(phase, found[phase], row)
    yield {"seconds": time.perf_counter() - begun}


def about(given: argparse.Namespace, loaded: Loaded, notes: list[str]) -> Row:
    shape = loaded.model.config
    there = torch.cuda.get_device_name() if given.device.startswith("cuda") else given.device
    return {
        "parameters": parameters(shape),
        "active": active_parameters(shape),
        "ops": loaded.model.ops.name,
        "device": there,
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "workload": {
            name: getattr(given, name) for name in ("prompts", "group", "prompt_tokens", "tokens")
        },
        "notes": notes,
    }


def ratio(phase: str, ours: Row, theirs: Row) -> Row:
    times = ours["tokens_per_second"] / theirs["tokens_per_second"]
    floor = ours["roofline_seconds"]
    best = min(ours["seconds"])
    return {
        "phase": phase,
        "times_transformers": times,
        "goal": GOALS[phase],
        "reached": times >= GOALS[phase],
        "share_of_roofline": None if floor is None else floor / best,
    }


def recorded(given: argparse.Namespace, config: Config, loaded: Loaded, tasks: Any) -> Row:
    """Rollouts once more, with the experts of every token."""
    engine = judge_of(config, loaded)
    tokens = config.engine.max_tokens
    sampling = sampling_of(config, min_tokens=tokens, record_routes=True)
    seconds = []
    for draw in range(given.repeats + 1):
        requests = [Request(task.token_ids, given.group, task.id, draw) for task in tasks]
        begun = gpu.now(given.device)
        groups = engine.generate(requests, sampling)
        seconds.append(gpu.now(given.device) - begun)
    kept = [c.routes_TLK for group in groups for c in group]
    shape = loaded.model.config
    size = (given.prompt_tokens + tokens - 1, shape.num_layers, shape.experts.chosen)
    wrong = [x for x in kept if x is None or tuple(x.shape) != size or int(x.min()) < 0]
    if wrong:
        raise SystemExit(f"{len(wrong)} of {len(kept)} completions lack routes of {size}")
    return {
        "seconds": seconds[1:],
        "tokens_per_second": len(kept) * tokens / min(seconds[1:]),
        "route_bytes": sum(x.nbytes for x in kept if x is not None),
    }


@torch.no_grad()
def mismatch(given: argparse.Namespace, config: Config, loaded: Loaded, tasks: Any) -> Row:
    """What sampler and learner say of the same tokens, and to which experts they send them."""
    model, tokens = loaded.model, min(LENGTH, given.tokens)
    requests = [Request(task.token_ids, given.group, task.id, 0) for task in tasks[:ROWS]]
    sampling = sampling_of(config, max_tokens=tokens, min_tokens=0, record_routes=True)
    groups = judge_of(config, loaded).generate(requests, sampling)
    apart, turned = [], []
    for request, group in zip(requests, groups, strict=True):
        for completion in group:
            ids = [*request.prompt, *completion.token_ids]
            before = len(request.prompt)
            token_T = torch.tensor(ids, device=given.device)
            attend = model.ops.attention([before], [[len(ids) - 1 - before]], token_T.device)
            query = HeadQuery(torch.arange(before - 1, len(ids) - 1).to(token_T), token_T[before:])
            position_T = packed_positions([len(ids) - 1], given.device)
            routes = Routes()
            found = model.predict(token_T[:-1], position_T, attend, query, routes)
            apart.append((found.logp_T.cpu() - completion.logp_T).abs())
            assert completion.routes_TLK is not None and routes.chosen_TLK is not None
            mine_TLK, theirs_TLK = routes.chosen_TLK.cpu().sort(-1)[0], completion.routes_TLK
            turned.append((mine_TLK != theirs_TLK.sort(-1)[0]).any(-1).flatten())
    row = {
        "phase": "sampler against learner",
        "mean_apart": float(torch.cat(apart).mean()),
        "most_apart": float(torch.cat(apart).max()),
        "turned_share": float(torch.cat(turned).float().mean()),
    }
    same = row["most_apart"] == 0 and row["turned_share"] == 0
    if (given.exact and not same) or not row["mean_apart"] <= MOST_APART[given.dtype]:
        raise SystemExit(f"sampler and learner are not the same model: {json.dumps(row)}")
    return row


# --- transformers -----------------------------------------------------------------------------


def peer(loaded: Loaded, given: argparse.Namespace) -> Any:
    """The same weights in transformers."""
    import transformers

    config = transformers.AutoConfig.for_model(**shapes.SHAPES[given.shape])
    usual = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, given.dtype))
    try:
        with torch.device(given.device):
            theirs = transformers.AutoModelForCausalLM.from_config(
                config, attn_implementation="sdpa", experts_implementation="grouped_mm"
            )
    finally:
        torch.set_default_dtype(usual)
    theirs.load_state_dict(loaded.model.state_dict())
    return theirs.eval()


@torch.no_grad()
def agreement(model: Policy, theirs: Any, given: argparse.Namespace) -> Row:
    """Both score the same tokens."""
    generator = torch.Generator().manual_seed(given.seed)
    length = min(LENGTH, given.tokens)
    token_NT = torch.randint(1, model.config.vocab_size, (ROWS, length), generator=generator)
    token_NT = token_NT.to(given.device)
    expected_NT = logp(theirs, token_NT, 1)
    take = torch.arange(ROWS * length).view(ROWS, length)[:, :-1].flatten().to(given.device)
    query = HeadQuery(take, token_NT[:, 1:].flatten())
    lengths = [length] * ROWS
    attend = model.ops.attention(lengths, [[] for _ in lengths], token_NT.device)
    position_T = packed_positions(lengths, given.device)
    found = model.predict(token_NT.flatten(), position_T, attend, query).logp_T
    apart = (found.view_as(expected_NT) - expected_NT).abs()
    row = {
        "phase": "agreement",
        "mean_apart": float(apart.mean()),
        "most_apart": float(apart.max()),
        "deviation_of_logp": float(expected_NT.std()),
    }
    if not row["mean_apart"] <= MOST_APART[given.dtype]:
        raise SystemExit(f"the two do not compute the same model: {json.dumps(row)}")
    return row


def logp(theirs: Any, token_NT: Tensor, prompt: int) -> Tensor:
    """Log-probabilities of all tokens behind so many."""
    wanted_NT = token_NT[:, prompt:]
    found = theirs(input_ids=token_NT[:, :-1], use_cache=False, logits_to_keep=wanted_NT.shape[1])
    logits_AV = found.logits.flatten(0, 1).float()
    return -F.cross_entropy(logits_AV, wanted_NT.flatten(), reduction="none").view_as(wanted_NT)


def their_rows(given: argparse.Namespace, theirs: Any) -> dict[str, Callable[[], Row]]:
    generator = torch.Generator().manual_seed(given.seed)
    size = (given.prompts, given.prompt_tokens)
    prompt_PT = torch.randint(1, theirs.config.vocab_size, size, generator=generator)
    prompt_NT = prompt_PT.repeat_interleave(given.group, 0).to(given.device)
    return {
        "rollout": partial(their_rollout, given, theirs, prompt_NT),
        "update": partial(their_update, given, theirs, prompt_NT),
    }


@torch.no_grad()
def their_rollout(given: argparse.Namespace, theirs: Any, prompt_NT: Tensor) -> Row:
    options = {
        "max_new_tokens": given.tokens,
        "min_new_tokens": given.tokens,
        "do_sample": True,
        "top_k": 0,
        "pad_token_id": 0,
        "attention_mask": torch.ones_like(prompt_NT),
    }
    theirs.generate(prompt_NT, **{**options, "max_new_tokens": 4, "min_new_tokens": 4})
    seconds = []
    for _ in range(given.repeats):
        begun = gpu.now(given.device)
        found = theirs.generate(prompt_NT, **options)
        seconds.append(gpu.now(given.device) - begun)
    written = found.shape[1] - prompt_NT.shape[1]
    if written != given.tokens:
        raise SystemExit(f"transformers wrote {written} tokens instead of {given.tokens}")
    return {"seconds": seconds, "tokens_per_second": len(found) * written / min(seconds)}


def their_update(given: argparse.Namespace, theirs: Any, prompt_NT: Tensor) -> Row:
    """Forward, backward and AdamW, in the micro-batches that are fastest."""
    generator = torch.Generator().manual_seed(given.seed)
    size = (len(prompt_NT), given.tokens)
    answer_NT = torch.randint(1, theirs.config.vocab_size, size, generator=generator)
    token_NT = torch.cat([prompt_NT, answer_NT.to(given.device)], 1)
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=0.0, fused=True)
    seconds: dict[int, list[float]] = {}
    for rows in sorted({min(rows, len(token_NT)) for rows in MICRO_ROWS}):
        shapes.give_back(given.device)
        try:
            times = [one_update(given, theirs, optimizer, token_NT, rows) for _ in range(3)]
        except torch.OutOfMemoryError:
            break
        seconds[rows] = times[1:]
    optimizer.zero_grad()
    gc.collect()
    best = min(min(times) for times in seconds.values())
    return {"seconds": seconds, "tokens_per_second": answer_NT.numel() / best}


def one_update(
    given: argparse.Namespace,
    theirs: Any,
    optimizer: torch.optim.Optimizer,
    token_NT: Tensor,
    rows: int,
) -> float:
    begun = gpu.now(given.device)
    for part_NT in token_NT.split(rows):
        logp(theirs, part_NT, given.prompt_tokens).sum().backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    return gpu.now(given.device) - begun


if __name__ == "__main__":
    sys.exit(main())
