"""Stage 6, update: batches and micro-batches, the learner, the optimizer."""
