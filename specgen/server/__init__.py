"""An HTTP server with OpenAI's API, whose answers are drafted for."""
