"""The code inside a sandbox. Only the standard library: its source is sent there as text."""
