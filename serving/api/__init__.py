"""The APIs: gRPC, HTTP and the open inference protocol, and the guard that every call passes."""
