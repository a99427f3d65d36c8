"""Drafts, drafters, policies, verification, and the loop over them: start with `loop.Loop.round`.

Samplers and grammars are in `specgen.text`, kinds of drafts in `specgen.drafters`. Nothing here
knows llama.cpp.
"""
