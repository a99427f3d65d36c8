"""Models by name: the known models, those on this disk, and downloads that resume. Nothing here
prints.
"""
