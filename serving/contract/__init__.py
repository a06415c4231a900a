"""What the layers above agree on: the manifest, what a backend does, the records that cross between them."""
