"""Methods compared under equal conditions.

arms.py          what is compared, as configurations that differ in nothing else
plan.py          all runs of a comparison, and what a folder has of them already
shared_start.py  what all runs start from, made and checked once
places.py        a place for each core or GPU
workers.py       processes that do the runs; worker.py is what each of them does
outcomes.py      what the run folders say
findings.py      arms and pairs with their intervals: compare.json
summary.py       the same for people; page.py and charts.py for browsers, papers and spreadsheets
"""
