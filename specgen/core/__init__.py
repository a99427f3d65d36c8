"""What a round works with: drafts, the text so far, and the rules by which a draft is judged."""
