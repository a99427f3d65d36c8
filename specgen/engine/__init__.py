"""From files and options to a stream of events: models that go together, prompts, and the loop of
propose, decode, verify and commit."""
