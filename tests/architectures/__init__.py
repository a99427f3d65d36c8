"""Tests of all architectures that llama.cpp supports: `make architectures`."""
