"""Metrics to TensorBoard, progress.csv, Weights & Biases and the terminal."""
