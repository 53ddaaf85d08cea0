"""Convert a trained model to a bundle, and its towers to ONNX."""
