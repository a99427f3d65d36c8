"""Longest matches: in the text itself, in files, in earlier answers."""
