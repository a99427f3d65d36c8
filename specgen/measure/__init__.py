"""Measurements: what drafting gains, whether it changes the text, and whether the build works."""
