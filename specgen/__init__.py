"""specgen: faster generation from local GGUF models by lossless speculative decoding."""

__version__ = "0.1.0"

__all__ = ["__version__"]
