"""Answer the lines of a file, many at once, so that nothing that is finished can be lost."""
