"""The folder that a run leaves: its results, its page, and what is read from it again."""
