"""Vision-language models: loading, LoRA, one forward pass for engines and learners, image preprocessing, export."""
