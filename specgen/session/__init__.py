"""Sessions and engines: they load the models, build the prompts and run the loop of propose,
decode, verify and commit, which produces a stream of events.
"""
