"""Drafts that are made for a target, out of the target's own text."""
