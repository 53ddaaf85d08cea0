"""Run a service in one or several processes."""
