"""Stage 7, new weights: checkpoints that a run goes on from, and export."""
