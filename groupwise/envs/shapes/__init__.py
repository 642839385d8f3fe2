"""Shapes of environments, a family a file: each is recognised by what it has, and wrapped."""
