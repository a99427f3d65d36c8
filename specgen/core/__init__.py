"""The parts of a round: drafts, the text so far, and the verifiers."""
