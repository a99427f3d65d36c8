"""Conversations: what was said, what of it the context holds, and the file that keeps it."""
