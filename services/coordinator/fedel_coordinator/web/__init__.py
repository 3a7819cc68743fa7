"""What services show over HTTP: their metrics, and on the coordinator a live page with the JSON behind it."""
