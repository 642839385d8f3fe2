"""Recipes in words, and which one to reach for."""
