"""Text: tokens and what they read as, samplers, and grammars."""
