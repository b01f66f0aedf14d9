"""Shared foundations: checks, results, random probes, progress bars, files, processes."""
