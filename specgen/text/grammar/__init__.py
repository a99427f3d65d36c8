"""Grammars that a text has to follow: their states, and readers of GBNF and JSON schemas."""
