"""Launchers: what starts the ranks of a run on one machine, under SLURM, on a Ray cluster."""
