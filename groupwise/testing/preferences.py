"""Cases of preferences: pairs, labelled answers, scores of a reward model, moving references."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from groupwise.errors import CaseError, nearest
from groupwise.losses import preferences as losses
from groupwise.losses.answer_sums import on_policy_weight_capped
from groupwise.losses.pairs import Pairs, logistic
from groupwise.losses.scores import ScoredPairs, bradley_terry
from groupwise.losses.unpaired import CalledAnswers, baseline_of
from groupwise.methods.composition import PairRecipe, UnpairedRecipe
from groupwise.methods.slots import Slot
from groupwise.optim.pairs import WholeUpdate, loss_of, whole_update
from groupwise.optim.roles.reference import parse_update
from groupwise.recipes import recipe
from groupwise.records import Average, Memory
from groupwise.testing.batch import LONGEST
from groupwise.testing.schema import PAIR_WORDS, Case, case_recipe, params_of, plain, tensor

SUMMED = {
    "token_mean_batch": losses.chosen_nll,
    "seq_mean_token_mean": losses.chosen_nll_by_answer,
    "seq_mean_token_sum": losses.chosen_nll_sum,
}
REDUCED = {"token_mean": losses.ipo_token_mean, "sum": losses.ipo_sum}


def preference(case: Case) -> dict[str, Any]:
    """Compute a loss of pairs: DPO and its relatives."""
    if "scores" in case["inputs"]:
        return online(case)
    made = _tuned(case)
    answers = _Answers(case["inputs"], refers=made.refers)
    memory, seen = _memory(case), answers.seen(case["inputs"])
    whole = whole_update(made, answers.place_NT, seen, answers.ref_NT, memory)
    if "delta" in case["inputs"]:
        given_N = tensor(case["inputs"]["delta"], "delta").expand(len(answers.place_NT) // 2)
        whole = replace(whole, columns={**whole.columns, "baseline_N": given_N})
    every = range(len(answers.place_NT))
    alone = made.replace(likelihood=())
    out = loss_of(made, every, answers.logp_NT, answers.ref_NT, whole)
    per_pair_N = loss_of(alone, every, answers.logp_NT, answers.ref_NT, whole).loss_N
    grads = torch.autograd.grad(out.loss, list(answers.leaves))
    found = {
        "margin": plain(out.margin_N),
        "loss": plain(out.loss),
        "loss_per_pair": plain(_by_rank(made, answers, per_pair_N, whole)),
        "grad_logp_chosen": plain(grads[0]),
        "grad_logp_rejected": plain(grads[1]),
        "reward_chosen": plain(out.chosen_reward_N),
        "reward_rejected": plain(out.rejected_reward_N),
        "chosen_displaced": plain(out.displaced_N.double()),
        "nll": -plain(answers.logp_NT[0::2].sum()) / whole.tokens,
    }
    if made.likelihood and made.likelihood[0].name != "chosen_nll":
        weight = made.likelihood[0]["weight"]
        found["nll"] = (found["loss"] - plain(per_pair_N.mean())) / weight
    if made.preference.name == "odds_ratio":
        found["log_odds"] = plain(out.margin_N)
    if "baseline_N" in whole.columns:
        found["delta"] = plain(whole.columns["baseline_N"][0])
    if whole.weight_N is not None:
        found["weights"] = plain(whole.weight_N)
    return found


class _Answers:
    """Chosen and rejected answers of a case: token by token, or as sums with their lengths."""

    def __init__(self, inputs: Mapping[str, Any], *, refers: bool) -> None:
        self.leaves = tuple(
            tensor(inputs[f"logp_{x}"], f"logp_{x}").requires_grad_()
            for x in ("chosen", "rejected")
        )
        if {x.dim() for x in self.leaves} not in ({1}, {2}):
            raise CaseError(
                "logp_chosen and logp_rejected must both be sums, one per pair, or both token by "
                "token, with mask_chosen and mask_rejected."
            )
        if self.leaves[0].shape[0] != self.leaves[1].shape[0] or not len(self.leaves[0]):
            raise CaseError(
                f"logp_chosen has {len(self.leaves[0])} answers and logp_rejected "
                f"{len(self.leaves[1])}: give as many of both, at least one."
            )
        self.by_token = self.leaves[0].dim() == 2
        self.masks = self._masks(inputs)
        self.place_NT = _interleaved([(m.cumsum(1) * m).long() for m in self.masks])
        self.logp_NT = self._spread(list(self.leaves))
        self.ref_NT = (
            self._spread(self._sides(inputs, "ref_logp"))
            if refers or "ref_logp_chosen" in inputs
            else None
        )

    def _sides(self, inputs: Mapping[str, Any], name: str) -> list[Tensor]:
        """Return an input of both sides, number for number beside the log-probabilities."""
        found = []
        for side, leaf in zip(("chosen", "rejected"), self.leaves, strict=True):
            x = tensor(inputs[f"{name}_{side}"], f"{name}_{side}")
            if x.shape != leaf.shape:
                raise CaseError(
                    f"{name}_{side} has the shape {[*x.shape]} and logp_{side} {[*leaf.shape]}: "
                    "they must be alike."
                )
            found.append(x)
        return found

    def _masks(self, inputs: Mapping[str, Any]) -> list[Tensor]:
        if self.by_token:
            return self._sides(inputs, "mask")
        if "len_chosen" not in inputs and "len_rejected" not in inputs:
            return [torch.ones(len(leaf), 1, dtype=torch.float64) for leaf in self.leaves]
        lengths = self._sides(inputs, "len")
        longest = max(float(x.max()) for x in lengths)
        if min(float(x.min()) for x in lengths) < 1 or longest > LONGEST:
            raise CaseError(f"len_chosen and len_rejected must be from 1 to {LONGEST}.")
        width = torch.arange(int(longest))
        return [(width < length_N[:, None]).double() for length_N in lengths]

    def _spread(self, sides: list[Tensor]) -> Tensor:
        """Set sums on the first token of each answer; leave what stands token by token."""
        rows = []
        for x, mask_NT in zip(sides, self.masks, strict=True):
            if self.by_token:
                rows.append(torch.where(mask_NT > 0, x, 0.0))
            else:
                rows.append(torch.nn.functional.pad(x[:, None], (0, mask_NT.shape[1] - 1)))
        return _interleaved(rows)

    def seen(self, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return what the policy says of all tokens before the update."""
        found = {"logp_NT": self.logp_NT.detach()}
        if "log_sum_sq_chosen" in inputs:
            found["square_mass_NT"] = self._spread(self._sides(inputs, "log_sum_sq"))
        return found


def _interleaved(sides: list[Tensor]) -> Tensor:
    """Return rows chosen, rejected, chosen, rejected, ..., padded to one width."""
    width = max(x.shape[1] for x in sides)
    padded = [torch.nn.functional.pad(x, (0, width - x.shape[1])) for x in sides]
    return torch.stack(padded, 1).flatten(0, 1)


def _memory(case: Case) -> Memory:
    inputs = case["inputs"]
    if "running_mean" not in inputs:
        return Memory()
    return Memory(pair_reward=Average(float(inputs["running_mean"]), int(inputs["running_steps"])))


def _by_rank(made: PairRecipe, answers: _Answers, loss_N: Tensor, whole: WholeUpdate) -> Tensor:
    """Return losses of pairs; those of AOT as comparisons, in the order that it sorts into."""
    slot, sums_N = made.preference, answers.logp_NT.detach().sum(1)
    if slot.name == "aot":
        own_N, other_N = sums_N[0::2] - sums_N[1::2], whole.columns["ranked_N"]
    elif slot.name == "aot_unpaired" and answers.ref_NT is not None:
        own_N = (sums_N - answers.ref_NT.sum(1))[0::2]
        other_N = whole.columns["ranked_rejected_N"]
    else:
        return loss_N
    apart_N = (own_N - other_N)[own_N.argsort(stable=True)]
    return losses.smoothed(slot["beta"] * apart_N, slot["noise"])


def _tuned(case: Case) -> PairRecipe:
    """Return the method's recipe with the case's hyper-parameters."""
    params, made = params_of(case), case_recipe(case)
    loss, likelihood = made.preference, made.likelihood
    if "reduce" in params:
        loss = _choice(REDUCED, params["reduce"], "reduce")(beta=loss["beta"])
    if "nll" in params:
        likelihood = (_choice(SUMMED, params["nll"], "nll")(),)
    if "alpha" in params and likelihood:
        likelihood = (likelihood[0].replace(weight=params["alpha"]),)
    weighing = made.weighing
    if weighing and "cap" in params:
        weighing = (on_policy_weight_capped(cap=params["cap"]),)
    return made.replace(
        preference=_with_words(loss, params),
        summing=_with_words(made.summing, params),
        likelihood=likelihood,
        weighing=weighing,
    )


def _with_words(slot: Slot, params: Mapping[str, Any]) -> Slot:
    changes = {
        own: params[word] for word, own in PAIR_WORDS.items() if word in params and own in slot
    }
    return slot.replace(**changes)


def _choice(known: Mapping[str, Any], word: Any, name: str) -> Any:
    if word not in known:
        raise CaseError(f"{name}={word!r}. {nearest(str(word), known)}")
    return known[word]


def online(case: Case) -> dict[str, Any]:
    """Compute online DPO: choose between two samples by their scores, and take the loss."""
    inputs, params = case["inputs"], params_of(case)
    made = case_recipe(case)
    score_NC = tensor(inputs["scores"], "scores")
    ended_NC = tensor(inputs.get("has_eos", torch.ones_like(score_NC).tolist()), "has_eos")
    penalty = float(params.get("missing_eos_penalty", 0.0))
    score_NC = torch.where(ended_NC > 0, score_NC, score_NC - penalty)
    leaf = tensor(inputs["logp"], "logp").requires_grad_()
    ref_NC = tensor(inputs["ref_logp"], "ref_logp")
    choices = [made.pairing(row_C) for row_C in score_NC]
    first = params.get("ties", "drop") == "first"
    keep = [choice.keep or first for choice in choices]
    chosen = [choice.chosen for choice in choices]
    rows = torch.tensor([row for row, kept in enumerate(keep) if kept], dtype=torch.long)
    best = torch.tensor(chosen)[rows]
    loss: Slot = {"sigmoid": logistic, "ipo": losses.ipo_sum}[params.get("loss", "sigmoid")](
        beta=params.get("beta", made.preference["beta"])
    )
    pairs = Pairs(
        leaf[rows, best], leaf[rows, 1 - best], ref_NC[rows, best], ref_NC[rows, 1 - best]
    )
    total = loss(pairs).loss
    (grad,) = torch.autograd.grad(total, leaf)
    return {
        "scores": plain(score_NC),
        "chosen": [float(x) for x in chosen],
        "keep": [float(x) for x in keep],
        "loss": plain(total),
        "grad_logp": plain(grad),
    }


def unpaired(case: Case) -> dict[str, Any]:
    """Compute a loss of labelled answers: KTO."""
    inputs, params = case["inputs"], params_of(case)
    made = recipe(case["method"])
    if not isinstance(made, UnpairedRecipe):
        raise CaseError(f"{case['method']!r} compares pairs: use kind 'preference_loss'.")
    leaf = tensor(inputs["logp"], "logp").requires_grad_()
    found: dict[str, Any] = {}
    baseline = torch.zeros((), dtype=torch.float64)
    others = None
    if params.get("baseline") != "none":
        others = tensor(inputs["kl_logp"], "kl_logp").requires_grad_()
        baseline = baseline_of(others, tensor(inputs["ref_kl_logp"], "ref_kl_logp"))
        found["grad_kl_logp"] = plain(torch.zeros_like(others))
    words = {"desirable_weight": "desirable", "undesirable_weight": "undesirable", "beta": "beta"}
    slot = made.preference.replace(
        **{own: params[name] for name, own in words.items() if name in params}
    )
    good_N = tensor(inputs["label"], "label") > 0
    reference_N = tensor(inputs["ref_logp"], "ref_logp")
    out = slot(CalledAnswers(leaf, reference_N, good_N, baseline))
    (grad,) = torch.autograd.grad(out.loss_N.mean(), leaf)
    return found | {
        "loss": plain(out.loss_N.mean()),
        "loss_per_row": plain(out.loss_N),
        "baseline": plain(baseline),
        "grad_logp": plain(grad),
    }


def reward_loss(case: Case) -> dict[str, Any]:
    """Compute a loss of scores: Bradley and Terry's, with margins and centring."""
    inputs, params = case["inputs"], params_of(case)
    leaves = [
        tensor(inputs[f"reward_{x}"], f"reward_{x}").requires_grad_()
        for x in ("chosen", "rejected")
    ]
    margin = inputs.get("margin", [0.0] * len(leaves[0]))
    slot = bradley_terry(centre=params.get("centre", 0.0))
    chosen_N, rejected_N = leaves
    loss = slot(ScoredPairs(chosen_N, rejected_N, tensor(margin, "margin"))).mean()
    grads = torch.autograd.grad(loss, leaves)
    return {
        "loss": plain(loss),
        "grad_reward_chosen": plain(grads[0]),
        "grad_reward_rejected": plain(grads[1]),
    }


def reference_update(case: Case) -> dict[str, Any]:
    """Move a reference towards the policy, where a step is due."""
    inputs, params = case["inputs"], params_of(case)
    share, every = float(params.get("alpha", 0.6)), int(params.get("every", 512))
    follows = parse_update(f"reset:{every}" if share == 1.0 else f"mix:{share}:{every}")
    due = follows.due(int(inputs["step"])) and int(inputs["step"]) > 0
    reference = tensor(inputs["reference"], "reference")
    if due:
        reference = reference.lerp(tensor(inputs["policy"], "policy"), follows.share)
    return {"reference": plain(reference), "updated": float(due)}
