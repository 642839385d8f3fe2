"""Stage 5, loss: one micro-batch of whole sequences, with gradient."""
