"""From a trained model to a bundle."""
