"""Files in, vectors out: a corpus embedded in shards, by one process or by a Ray cluster."""
