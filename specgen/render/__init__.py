"""Show generations and results: renderers that consume events, and tables."""
