"""Evaluation of models: held-out accuracy, suites, and the significance of differences."""
