"""Text: sequences, samplers, grammars."""
