"""Watching a run: while it goes on, and afterwards."""
