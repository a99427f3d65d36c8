"""Drafts that go on learning from the answers that a user really gets."""
