"""Which draft for which target: what the user named, what is known, what was measured here."""
