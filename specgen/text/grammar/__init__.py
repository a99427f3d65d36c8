"""Grammars that a text has to follow: the interface for the loop, and readers of GBNF and JSON
schemas.
"""
