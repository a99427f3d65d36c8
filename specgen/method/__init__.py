"""Drafts, drafters, policies, verification, and the loop over them: start with
`loop.py::Loop.round`. Samplers and grammars are in `specgen.text`, kinds of drafts in
`specgen.drafters`; llama.cpp is unknown here.
"""
