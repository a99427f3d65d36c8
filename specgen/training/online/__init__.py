"""Drafts that learn from the answers that the user gets."""
