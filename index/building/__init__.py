"""Build an index over a bundle: its spec, training, and the choice of settings by measured recall."""
