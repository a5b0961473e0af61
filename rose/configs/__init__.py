"""What each architecture's config.json says, one file a family; none knows torch or weights."""
