"""specgen inside programs that people already use: llama-cpp-python's `Llama`, and `llm`."""
