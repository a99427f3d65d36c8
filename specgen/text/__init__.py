"""Text: the tokens of a model, the samplers that choose them, and grammars."""
