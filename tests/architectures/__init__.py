"""The test tier of all architectures that llama.cpp runs: `make architectures`."""
