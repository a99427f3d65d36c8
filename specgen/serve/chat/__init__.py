"""Conversations: messages, the part that fits into the context, and the file that keeps them."""
