"""Pruning methods under one protocol."""
