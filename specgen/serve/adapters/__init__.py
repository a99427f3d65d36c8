"""Drafts for other programs that use llama.cpp."""
