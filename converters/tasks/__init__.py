"""What the five beats of a conversion are for a model that generates, and for one that is pooled."""
