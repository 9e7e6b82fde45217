"""Sizes by which the engines allocate, without torch: the memory plan reads them, too."""

PREFILL_TOKENS = 16_384  # padded prompt tokens per prefill forward pass of the transformers engine
VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # of LoRA: what vLLM has kernels for


def graph_sizes(samples: int) -> list[int]:
    """Tokens of the steps that vLLM captures as CUDA graphs where it runs `samples` at once. They are those of its own
    grid that decoding needs, so its larger ones, up to twice as many tokens, take no memory."""
    most = min(samples, 512)
    return sorted({size for size in (1, 2, 4, *range(8, 256, 8), *range(256, most + 1, 16), most) if size <= most})
