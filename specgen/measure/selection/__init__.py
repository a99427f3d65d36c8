"""The choice of a draft for a target: named by the user, known, or measured here."""
