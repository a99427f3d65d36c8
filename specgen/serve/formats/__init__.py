"""The request and answer formats of all APIs, a module for each.

- `chat_completions`, `completions`, `embeddings`: OpenAI's older API
- `responses`: OpenAI's Responses API
- `messages`: Anthropic's Messages API
- `llama_server`: the endpoints of llama.cpp's own server
- `ollama`: Ollama's endpoints

Each has a pydantic model of its request, a function that reads a body as a `ParsedRequest`, and a
writer that turns the answer into the form of the API. Fields that several APIs share are in
`generation_request`, how models write tool calls is in `tool_calls`.
"""
