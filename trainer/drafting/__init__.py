"""A first recipe from the data themselves, which says why it is as it is."""
