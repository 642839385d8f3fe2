"""Stage 4, advantages: all groups of a batch, no gradient."""
