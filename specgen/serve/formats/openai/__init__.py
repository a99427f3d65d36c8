"""Requests and answers in the form of OpenAI's API, as other programs send and expect them."""
