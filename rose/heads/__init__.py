"""What follows a transformer: pooled vectors now."""
