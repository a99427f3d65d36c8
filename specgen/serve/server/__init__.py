"""An HTTP server with OpenAI's API and speculative decoding."""
