"""Small tools for files, JSON, processes and the machine, which know nothing of models."""
