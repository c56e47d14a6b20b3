"""Every model of TRACING.md's table through one contract: python -m zoo."""
