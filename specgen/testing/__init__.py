"""What tests, `specgen doctor` and `specgen verify` try things on: tiny models, known bugs."""
