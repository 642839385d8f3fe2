"""Other architectures: transformers' layers behind the same interface."""
