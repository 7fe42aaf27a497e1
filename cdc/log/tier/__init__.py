"""The second place of sealed segments, and reading them wherever they are."""
