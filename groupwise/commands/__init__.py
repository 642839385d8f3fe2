"""The commands that come before and after training, one module each.

A module has `add_parser`, which says what the command takes, and `run`, which does it. Nothing
heavy is imported before a command runs.
"""
