"""Supervised fine-tuning on conversations with images: their files, their encoding, the training step."""
