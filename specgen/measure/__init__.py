"""Tools that judge: which draft is fastest (`selection`), whether output is exact (`proof`), how fast
decoding is (`bench`), and whether the build works (`doctor`)."""
