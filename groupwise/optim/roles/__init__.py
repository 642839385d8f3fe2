"""Models that take part beside the policy: what they give to a batch, and how they change."""
