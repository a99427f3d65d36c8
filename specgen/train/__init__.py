"""Drafts made for one target, from text that the target wrote itself."""
