"""The page at `/`: its files, the numbers that it shows, and the streams that carry them."""
