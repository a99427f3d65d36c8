"""Searches for mistakes that take minutes or hours; pytest does not run them."""
