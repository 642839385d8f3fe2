"""The policy's one forward pass, for sampler and learner alike, and what it costs."""
