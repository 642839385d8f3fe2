"""The viewer: run folders as web pages on this machine.

runs.py (files that grow) -> facts.py, curves.py, steps.py, prompts.py, search.py, tokens.py,
chat.py (what a page shows) -> pages.py, overlay.py, answers.py, export.py (HTML) -> server.py (who
may ask). Completions are hostile text until shown otherwise: pages are made by templates that
escape everything, and scripts write text nodes only.
"""
