"""Helpers that every layer may use: progress lines, users' files, optional packages."""
