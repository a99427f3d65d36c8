"""What is learnt about a machine and its models: what decoding costs, with how many threads and which
type of weights a model is fastest. `memory` keeps it between runs."""
