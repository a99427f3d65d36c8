"""Searches for bugs that take minutes or hours. pytest does not run them."""
