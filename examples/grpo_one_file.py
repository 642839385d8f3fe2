"""GRPO in one file: the whole algorithm, top to bottom, with nothing but PyTorch.

    python examples/grpo_one_file.py

A tiny policy learns to spell a secret word for each of 16 prompts: it writes letters until it
writes the stop sign, and a grader says which share of the word it got right. Nobody shows it the
word.

The loss below is held equal to `groupwise.recipe("grpo")`, value and gradient, by a test.
Paper: DeepSeekMath, arXiv 2402.03300.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

# Shapes: P prompts, G answers per prompt (the group), N = P·G answers, T tokens, V letters.
PROMPTS, GROUP, LENGTH, LETTERS, STOP = 16, 8, 6, 8, 0
STEPS, UPDATES, LEARNING_RATE = 150, 2, 0.1
CLIP, KL_WEIGHT, EPSILON = 0.2, 0.01, 1e-6


def group_advantages(reward_N: Tensor, group_size: int) -> Tensor:
    """Return how much better than its group each answer was: (R − mean) / (std + ε)."""
    reward_PG = reward_N.reshape(-1, group_size)
    centred_PG = reward_PG - reward_PG.mean(1, keepdim=True)
    return (centred_PG / (reward_PG.std(1, keepdim=True) + EPSILON)).flatten()


def grpo_loss(
    logp_NT: Tensor,
    old_logp_NT: Tensor,
    ref_logp_NT: Tensor,
    mask_NT: Tensor,
    advantage_N: Tensor,
    clip: float = CLIP,
    kl_weight: float = KL_WEIGHT,
) -> Tensor:
    """Return clipped policy gradient plus KL to the reference; mean over tokens, then answers."""
    # How much likelier is each token now than when it was sampled? Padding must not matter.
    log_ratio_NT = torch.where(mask_NT, logp_NT - old_logp_NT, 0.0)
    ratio_NT = log_ratio_NT.exp()
    # Follow the advantage, but stop once the ratio has left the trust region.
    advantage_NT = advantage_N[:, None]
    objective_NT = torch.minimum(
        ratio_NT * advantage_NT, ratio_NT.clamp(1 - clip, 1 + clip) * advantage_NT
    )
    # Stay close to the reference: k3 = e^{−x} + x − 1 with x = log π − log π_ref, never negative.
    x_NT = torch.where(mask_NT, logp_NT - ref_logp_NT, 0.0)
    kl_NT = (-x_NT).exp() + x_NT - 1
    loss_NT = torch.where(mask_NT, -objective_NT + kl_weight * kl_NT, 0.0)
    return (loss_NT.sum(1) / mask_NT.sum(1)).mean()


def log_probabilities(policy_PTV: Tensor, prompt_N: Tensor, answer_NT: Tensor) -> Tensor:
    """Return log π of each written letter."""
    return policy_PTV.log_softmax(-1)[prompt_N].gather(-1, answer_NT[..., None])[..., 0]


def write_answers(policy_PTV: Tensor, prompt_N: Tensor) -> tuple[Tensor, Tensor]:
    """Sample every answer; its mask ends with the first stop sign (which is learned too)."""
    probability_NTV = policy_PTV.softmax(-1)[prompt_N]
    answer_NT = torch.multinomial(probability_NTV.flatten(0, 1), 1).reshape(-1, LENGTH)
    stops_before_NT = (answer_NT == STOP).long().cumsum(1) - (answer_NT == STOP).long()
    return answer_NT, stops_before_NT == 0


def grade(answer_NT: Tensor, mask_NT: Tensor, word_NT: Tensor) -> Tensor:
    """Return the share of the word's letters (stop sign included) that stand where they should."""
    in_word_NT = (word_NT != STOP).long().cummin(1).values.roll(1, 1)
    in_word_NT[:, 0] = 1  # the word and its stop sign
    right_NT = (answer_NT == word_NT) & mask_NT & in_word_NT.bool()
    return right_NT.sum(1) / in_word_NT.sum(1)


def train(seed: int = 0, steps: int = STEPS, report: bool = True) -> tuple[float, float]:
    """Return the mean reward before and after."""
    torch.manual_seed(seed)
    word_PT = torch.randint(1, LETTERS, (PROMPTS, LENGTH))
    for word_T, end in zip(word_PT, torch.randint(2, LENGTH, (PROMPTS,)), strict=True):
        word_T[end:] = STOP
    policy_PTV = torch.zeros(PROMPTS, LENGTH, LETTERS, requires_grad=True)
    reference_PTV = policy_PTV.detach().clone()
    optimizer = torch.optim.Adam([policy_PTV], lr=LEARNING_RATE)
    prompt_N = torch.arange(PROMPTS).repeat_interleave(GROUP)
    rewards = []
    for step in range(steps):
        with torch.no_grad():
            # 1. sample a group of answers for every prompt, 2. grade them, 3. compare in groups
            answer_NT, mask_NT = write_answers(policy_PTV, prompt_N)
            reward_N = grade(answer_NT, mask_NT, word_PT[prompt_N])
            advantage_N = group_advantages(reward_N, GROUP)
            old_logp_NT = log_probabilities(policy_PTV, prompt_N, answer_NT)
            ref_logp_NT = log_probabilities(reference_PTV, prompt_N, answer_NT)
        for _ in range(UPDATES):  # 4. a few clipped steps on the same answers
            logp_NT = log_probabilities(policy_PTV, prompt_N, answer_NT)
            loss = grpo_loss(logp_NT, old_logp_NT, ref_logp_NT, mask_NT, advantage_N)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        rewards.append(float(reward_N.mean()))
        if report and (step % 25 == 0 or step == steps - 1):
            useful = float((advantage_N.reshape(PROMPTS, GROUP).abs().amax(1) > 0).float().mean())
            print(f"step {step:4d}   reward {rewards[-1]:.3f}   groups that teach {useful:4.0%}")
    return rewards[0], rewards[-1]


if __name__ == "__main__":
    start = time.perf_counter()
    before, after = train()
    print(f"\nmean reward {before:.2f} -> {after:.2f} in {time.perf_counter() - start:.1f} s")
