"""What every layer stands on: checks, results, randomness, progress, files, processes."""
