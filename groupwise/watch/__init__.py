"""What is said of a run: while it goes on, and afterwards."""
