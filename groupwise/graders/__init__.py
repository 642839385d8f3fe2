"""Stage 3, rewards: what a completion is worth, and how that came about."""
