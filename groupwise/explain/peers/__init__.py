"""Configurations of other tools, and the recipe that computes what they compute."""
