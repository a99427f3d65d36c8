"""Formats of OpenAI's and Anthropic's APIs."""
