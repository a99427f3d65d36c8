"""Drafts, drafters, policies, verification, and the loop over them: start with `loop.py::Loop.round`.

Samplers and grammars are in `specgen.text`, the kinds of drafts in `specgen.drafters`. Nothing here knows llama.cpp
or a file."""
