"""Measures of networks: sharpness, landscapes, noise."""
