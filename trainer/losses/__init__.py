"""Loss families, weights and mining over a batch's logits [METHODS §2, §3]."""
