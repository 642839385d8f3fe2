"""Resources that a configuration would take: memory by part, seconds by phase."""
