"""Where negatives come from [METHODS §2.1]."""
