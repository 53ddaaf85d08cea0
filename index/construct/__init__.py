"""Build an index over a bundle: what was asked for, training, and choosing settings by measured recall."""
