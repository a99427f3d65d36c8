"""Answers the lines of a file, many at once; no finished result can be lost."""
