"""Loading vision-language models, LoRA, image preprocessing, and the tiny offline VLM."""
