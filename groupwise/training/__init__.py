"""The loop, top to bottom, and what it consists of."""
