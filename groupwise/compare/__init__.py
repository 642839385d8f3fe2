"""Methods side by side under equal conditions.

arms.py      what is compared, as configurations that differ in nothing else
plan.py      all runs of a comparison, and what a folder has of them already
workers.py   processes that do them; worker.py is what each of them runs
outcomes.py  what the run folders say
findings.py  arms and pairs with their intervals: compare.json
words.py     the same for people; page.py and tables.py for browsers and spreadsheets
"""
