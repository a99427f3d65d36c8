"""Grammars that a text has to follow: what the loop asks of one, and reading GBNF."""
