"""Small programs that show how specgen works."""
