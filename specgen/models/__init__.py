"""Models by name: the known ones, those on this disk, and downloads that resume.

Nothing here prints.
"""
