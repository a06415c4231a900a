"""What is left of a run: the document that is stored, and the ways to show it."""
