"""Optimisers that generalise, averages of their iterates, and schedules."""
