"""Shared helpers: checks, results, randomness, progress, files, processes."""
