"""Things that a configuration names, made ready for training, evaluation, probe and plan."""
