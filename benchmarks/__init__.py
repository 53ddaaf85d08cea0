"""Sources of the published numbers; each module runs with one command."""
