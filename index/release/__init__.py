"""Releases: a bundle and its index in one directory, the pointer to the one that serves, and promises."""
