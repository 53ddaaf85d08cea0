"""From queries to ranked labels. Knows no HTTP."""
