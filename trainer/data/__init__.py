"""From files to integer pairs and encoded features."""
