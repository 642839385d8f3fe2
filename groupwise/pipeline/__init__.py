"""Pipelines: `[[stage]]` tables of one file, each an ordinary run that starts from another."""
