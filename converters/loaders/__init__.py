"""How several families read their checkpoints: what they share, so that a family's file has only its own."""
