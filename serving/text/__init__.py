"""The text side of a model: from the words of a call to sequences for the engine, and back."""
