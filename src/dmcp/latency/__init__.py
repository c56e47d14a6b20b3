"""Latency tables: measured, fitted, used as a budget."""
