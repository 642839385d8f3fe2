"""Stage 2, rollouts: what every engine does, and the engines behind it."""
