"""Run a service as one process, or as several that share a port, and handle their connections."""
