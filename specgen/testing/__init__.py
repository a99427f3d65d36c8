"""Tiny models, a fake backend and known bugs, for the tests, `specgen doctor` and `specgen verify`."""
