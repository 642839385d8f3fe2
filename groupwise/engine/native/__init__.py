"""The native engine: the learner's own forward pass on the learner's own parameters."""
