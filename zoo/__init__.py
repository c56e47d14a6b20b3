"""Every model of the zoo's table through one contract: python -m zoo."""
