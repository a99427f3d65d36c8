"""Requests and answers in the form of OpenAI's Responses API, translated to and from those of a chat."""
