"""Vocabulary shortlists: which words a source may need, learned from parallel text."""
