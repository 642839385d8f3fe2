"""The viewer: run folders as web pages on this machine.

runs.py (files that grow) -> steps.py, prompts.py, tokens.py, chat.py (what a page shows) ->
pages.py (HTML) -> server.py (who may ask). Completions are hostile text until shown otherwise:
pages are made by templates that escape everything, and scripts write text nodes only.
"""
