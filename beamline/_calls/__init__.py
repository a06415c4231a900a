"""Between the public types and protobuf: a method's arguments become an operation, and its messages answers."""
