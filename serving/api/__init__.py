"""Every way in: gRPC, HTTP and the open inference protocol, and the guard before them all."""
