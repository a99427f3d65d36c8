"""Which draft a target gets: named by the user, known, or measured here."""
