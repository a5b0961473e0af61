"""A run's results for people and for other tools: Markdown, HTML with plots, .hgrm, PNG."""
