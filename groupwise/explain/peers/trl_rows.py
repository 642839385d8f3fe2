"""TRL's trainers that learn from rows of the data: trl/trainer/sft_*.py and dpo_*.py."""

from __future__ import annotations

from typing import Any

from groupwise.explain.peers import trl
from groupwise.explain.peers.answer import Answer, Settings, number

_RUN: dict[str, Any] = {
    name: trl.GRPO[name]
    for name in ("lr_scheduler_type", "warmup_steps", "warmup_ratio", "weight_decay", "adam_beta1",
                 "adam_beta2", "adam_epsilon", "max_grad_norm", "seed", "max_steps",
                 "per_device_train_batch_size", "gradient_accumulation_steps", "sync_ref_model",
                 "ref_model_mixup_alpha", "ref_model_sync_steps")
} | {"num_train_epochs": 3.0, "router_aux_loss_coef": None}  # fmt: skip
SFT = _RUN | {
    "learning_rate": 2e-5, "loss_type": "nll", "packing": False, "assistant_only_loss": False,
    "completion_only_loss": None,
}  # fmt: skip
DPO = _RUN | {
    "learning_rate": 1e-6, "loss_type": ["sigmoid"], "loss_weights": None, "beta": 0.1,
    "label_smoothing": 0.0, "discopop_tau": 0.05, "ld_alpha": None, "use_weighting": False,
    "f_divergence_type": "reverse_kl", "f_alpha_divergence_coef": 0.5,
}  # fmt: skip
# loss_type -> (the recipe of its paper, its preference)
PREFERENCES = {
    "sigmoid": ("dpo", "logistic(beta={beta})"),
    "hinge": ("hinge", "hinge(beta={beta})"),
    "ipo": ("ipo", "ipo_token_mean(beta={beta})"),
    "exo_pair": ("exo_pair", "exo(beta={beta}, noise={noise})"),
    "nca_pair": ("nca_pair", "nca(beta={beta})"),
    "robust": ("robust_dpo", "robust(beta={beta}, noise={noise})"),
    "bco_pair": ("bco_pair", "bco_pair(beta={beta})"),
    "sppo_hard": ("sppo_hard", "sppo_hard(beta={beta})"),
    "aot": ("aot", "aot(beta={beta}, noise={noise})"),
    "aot_unpaired": ("aot_unpaired", "aot_unpaired(beta={beta}, noise={noise})"),
    "apo_zero": ("apo_zero", "apo_zero(beta={beta})"),
    "apo_down": ("apo_down", "apo_down(beta={beta})"),
    "discopop": ("discopop", "discopop(beta={beta}, tau={tau})"),
    "sigmoid_norm": ("sigmoid_norm", "logistic_token_mean(beta={beta})"),
}
DIVERGENCES = {"js_divergence": "js", "forward_kl": "forward_kl", "alpha_divergence": "alpha"}


def sft(theirs: Settings) -> Answer:
    """Answer an SFTConfig."""
    kind = "nll" if theirs["loss_type"] in (None, "chunked_nll") else str(theirs["loss_type"])
    name = "dft" if kind == "dft" else "sft"
    answer = Answer(trl.VERSION, paper=name)
    answer.settings["recipe.name"] = name
    if kind not in ("nll", "dft"):
        answer.missing["loss_type"] = f"{kind!r} is no loss of {trl.VERSION} that is known here"
    if not theirs["assistant_only_loss"]:
        answer.differs.append(
            "Of rows with messages TRL learns every turn unless assistant_only_loss is on; here "
            "the assistant's alone are learned."
        )
    if theirs["completion_only_loss"] is False:
        answer.missing["completion_only_loss"] = (
            "prompts are never learned; a row with one column `text` is learned whole"
        )
    _balance(theirs, answer)
    _rows(theirs, answer)
    return answer


def dpo(theirs: Settings) -> Answer:
    """Answer a DPOConfig."""
    kinds = theirs["loss_type"]
    kinds = [str(each) for each in kinds] if isinstance(kinds, list) else [str(kinds)]
    weights = theirs["loss_weights"] or [1.0] * len(kinds)
    weighed = dict(zip(kinds, map(float, weights), strict=False))
    with_rows = weighed.pop("sft", 0.0)
    kind = next(iter(weighed), "sigmoid")
    answer = Answer(trl.VERSION, paper=PREFERENCES.get(kind, PREFERENCES["sigmoid"])[0])
    if kind not in PREFERENCES:
        answer.missing["loss_type"] = f"{kind!r} is no loss of {trl.VERSION} that is known here"
    elif len(weighed) > 1:
        answer.missing["loss_type"] = f"{', '.join(weighed)} at once; here {kind} alone"
    elif not weighed:
        answer.missing["loss_type"] = (
            "'sft' alone is recipe `sft` with data.completion = \"{chosen}\""
        )
    answer.settings["recipe.name"] = answer.paper
    answer.settings["recipe.preference"] = _preference(theirs, answer, kind)
    if with_rows and weighed:
        share = with_rows / (weighed[kind] or 1.0)
        answer.settings["recipe.likelihood"] = f"chosen_nll(weight={number(share)})"
    if weighed.get(kind, 1.0) != 1.0:
        answer.differs.append(
            "loss_weights scale the whole loss there; here the preference counts 1, and the "
            "learning rate says how large a step is."
        )
    if theirs["use_weighting"]:
        answer.settings["recipe.weighing"] = "on_policy_weight()"
    if (alpha := theirs["ld_alpha"]) is not None:
        answer.settings["recipe.summing"] = f"shared_length(alpha={number(float(alpha))})"
    _balance(theirs, answer)
    _rows(theirs, answer)
    trl.moving_reference(theirs, answer)
    return answer


def _preference(theirs: Settings, answer: Answer, kind: str) -> str:
    beta, noise = theirs.number("beta"), theirs.number("label_smoothing")
    if kind == "exo_pair" and not noise:
        noise = 1e-3
        answer.differs.append("EXO is undefined without noise: 0.001 stands for label_smoothing.")
    if noise and kind == "sigmoid":
        answer.differs.append(
            f"{trl.VERSION} smooths no labels with loss_type 'sigmoid'; earlier versions did, and "
            "that is recipe cdpo here."
        )
    if kind == "bco_pair":
        answer.missing["loss_type"] = (
            f"'bco_pair' is measured from a running mean here, and from 0 in {trl.VERSION}"
        )
    divergence = str(theirs["f_divergence_type"])
    if divergence != "reverse_kl":
        if kind == "sigmoid" and divergence in DIVERGENCES:
            alpha = theirs.number("f_alpha_divergence_coef")
            answer.paper = answer.settings["recipe.name"] = "f_dpo"
            return (
                f"f_divergence(beta={number(beta)}, divergence='{DIVERGENCES[divergence]}', "
                f"alpha={number(alpha)})"
            )
        answer.missing["f_divergence_type"] = f"{divergence!r} with {kind}"
    form = PREFERENCES.get(kind, PREFERENCES["sigmoid"])[1]
    tau = theirs.number("discopop_tau")
    return form.format(beta=number(beta), noise=number(noise), tau=number(tau))


def _balance(theirs: Settings, answer: Answer) -> None:
    if theirs["router_aux_loss_coef"]:
        answer.missing["router_aux_loss_coef"] = "balance(...) belongs to recipes with rewards"


def _rows(theirs: Settings, answer: Answer) -> None:
    """Count rows: here a batch is one update, whatever the memory."""
    rows = theirs.whole("per_device_train_batch_size")
    windows = max(theirs.whole("gradient_accumulation_steps"), 1)
    answer.settings["prompts_per_step"] = rows * windows
    answer.differs.append(
        f"{rows} rows x {windows} passes are one batch on one device; multiply prompts_per_step by "
        "the number of devices."
    )
    steps = theirs.whole("max_steps")
    if steps > 0:
        answer.settings["steps"] = steps
    else:
        answer.settings["epochs"] = number(theirs.number("num_train_epochs"))
    trl.optimizer(theirs, answer)
    answer.settings["seed"] = theirs.whole("seed")
