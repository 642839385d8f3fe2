"""A reward of your own: any function in Python, no file of settings.

    python examples/own_reward.py

The embedded model learns to make sums come out near. It runs for a minute on a CPU.
"""

from groupwise import load_config, train


def close(completion: str, answer: str) -> float:
    """Return 1 for the right number, and less the further away it is."""
    digits = completion.strip()
    return 1 / (1 + abs(int(digits) - int(answer))) if digits.isdigit() else 0.0


SETTINGS = {
    "prompts_per_step": 32,
    "group_size": 8,
    "steps": 80,
    "model": {"path": "tiny", "device": "cpu", "threads": 1},
    "tiny": {"width": 64, "layers": 2},
    "data": {"train": "arithmetic", "options": {"digits": 1, "terms": 3}},
    "engine": {"max_tokens": 4},
    "optim": {"learning_rate": 7e-4, "warmup_steps": 5, "beta2": 0.95},
    "eval": {"every": 20, "temperature": 1.0},
    "recipe": "grpo",
}

if __name__ == "__main__":
    summary = train(load_config(SETTINGS), "runs/own_reward", reward=close)
    print(f"reward {summary['reward_before']:.2f} -> {summary['reward_after']:.2f}")
