"""How good a model is: held-out accuracy, suites, and what differences mean."""
