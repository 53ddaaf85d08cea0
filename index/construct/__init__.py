"""Make an index over a bundle: what to build, training it, and choosing its settings by measured recall."""
