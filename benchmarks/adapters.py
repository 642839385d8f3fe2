"""Memory of one update with and without an adapter and a quantised base, beside what is planned.

    python benchmarks/adapters.py MODEL

Each kind in a process of its own: a reference, AdamW, two updates on one sequence of 256 tokens, in
float32 on one CPU core. Prints MiB: the frozen weights, the process's peak, and the plan's.
"""

from __future__ import annotations

import subprocess
import sys

KINDS = (
    (),
    ("adapter.rank=16",),
    ("adapter.rank=16", "model.quantize=int8"),
    ("adapter.rank=16", "model.quantize=nf4"),
)
TOKENS = 256
MIB = 2**20
ON_CPU = ("model.device=cpu", "model.dtype=float32")


def measure(path: str, settings: list[str]) -> None:
    import torch

    from groupwise.config import load
    from groupwise.model import cost
    from groupwise.model.memory import peak_bytes
    from groupwise.model.policy import starting_policy
    from groupwise.optim.learner import PolicyLearner
    from groupwise.optim.packs import Sequences, outputs
    from groupwise.optim.roles.reference import Reference
    from groupwise.prepare.setup import frozen_of

    torch.set_num_threads(1)
    config = load(None, [f"model.path={path}", "recipe=grpo", *ON_CPU, *settings])
    model = starting_policy(config, path).model
    held = Reference(model, "frozen")
    learner = PolicyLearner(model, config.recipe, config.optim, 1.0)
    rows = Sequences([tuple(range(64))], [tuple(range(TOKENS - 63))])

    def accumulate() -> list[tuple[str, torch.Tensor]]:
        packed = rows.pack([0], learner.device)
        logp_NT = outputs(model, packed, temperature=1.0)["logp_NT"]
        (-logp_NT.mean()).backward()
        return [("logp_NT", logp_NT.detach())]

    for _ in range(2):
        learner.update(accumulate, 1e-5)
    assert held.model is not model
    frozen = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    counted = cost.memory(
        model.config,
        slots=0,
        max_tokens=1,
        prompt=1,
        group=1,
        micro_tokens=TOKENS,
        reference=True,
        width=cost.SINGLE,
        cpu=True,
        frozen=frozen_of(config, model.config),
    )
    loading = cost.loading(model.config, cost.SINGLE, frozen_of(config, model.config))
    figures = [frozen, peak_bytes("cpu"), max(cost.peak(counted), loading)]
    kind = " ".join(settings) or "all weights"
    print(f"{kind:<40}" + "".join(f"{x / MIB:>10,.0f}" for x in figures))


def main() -> None:
    path, *settings = sys.argv[1:]
    if settings:
        measure(path, [x for x in settings if x != "-"])
        return
    print(f"{'':<40}{'frozen':>10}{'peak':>10}{'plan':>10}")
    for kind in KINDS:
        subprocess.run([sys.executable, __file__, path, "-", *kind], check=True)


if __name__ == "__main__":
    main()
