"""Stage 2b, turns: environments and tools, which answer the policy between its turns."""
