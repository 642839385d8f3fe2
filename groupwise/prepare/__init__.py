"""What a configuration names, checked and made ready: for training, evaluation, probe and plan."""
