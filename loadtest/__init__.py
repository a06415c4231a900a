"""The load tester: latency and throughput of a server, as its clients see them."""
