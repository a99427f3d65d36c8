"""specgen's drafts inside other programs: llama-cpp-python's `Llama`, and `llm`."""
