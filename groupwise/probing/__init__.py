"""Tests before training: how often prompts pass, and which rows are worth it."""
