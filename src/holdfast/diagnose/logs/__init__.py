"""What lines of other people's logs look like, and what they mean: one family of software per file."""
