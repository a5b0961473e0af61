"""The HTTP routes, one thin file a dialect."""
