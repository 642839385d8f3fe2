"""Answers in numbers and formulas: where a text says its answer, how it is read, what it equals."""
