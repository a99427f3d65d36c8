"""What is learnt about a machine and its models: what decodes cost, how often drafts are accepted,
with how many threads and which type of weights a model is fastest. `memory` keeps it."""
