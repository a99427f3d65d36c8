"""Requests and answers in the form of Anthropic's Messages API, translated to and from those of a chat."""
