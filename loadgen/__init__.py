"""A load generator for embedding servers: a black box client that knows HTTP and nothing of any server."""
