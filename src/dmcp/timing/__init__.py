"""Budgets of latency: cut networks are timed, a table is made of their times, and what is chosen is timed, too."""
