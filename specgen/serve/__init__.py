"""Ways to serve an engine to others: OpenAI's format, the server, batches of requests, chats, and
adapters for other libraries.
"""
