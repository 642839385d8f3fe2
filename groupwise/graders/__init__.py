"""Stage 3, rewards: the worth of a completion, and the reasons for it."""
