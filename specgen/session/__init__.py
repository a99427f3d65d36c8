"""Sessions and engines: the loaded models, and what generates answers with them.

`open_session` loads the models, `Prompts` makes the prompts, and an `Engine` runs the loop of
drafting, verifying and committing for several answers at once, which yields events.
"""
