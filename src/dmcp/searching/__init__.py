"""The search: steps of the weights and of the alphas in turn, what it is asked for and what it finds."""
