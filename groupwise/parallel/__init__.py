"""Who learns: the processes that share one batch."""
