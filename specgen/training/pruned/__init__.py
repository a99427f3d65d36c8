"""Drafts that are their target without some of its blocks (layers)."""
