"""Answers for others: the HTTP server, batches of requests, and adapters for other programs."""
