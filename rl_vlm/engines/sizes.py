"""Sizes by which the engines allocate, without torch: the memory plan reads them, too."""

PREFILL_TOKENS = 16_384  # padded prompt tokens per prefill forward pass of the transformers engine
VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # of LoRA: what vLLM has kernels for
