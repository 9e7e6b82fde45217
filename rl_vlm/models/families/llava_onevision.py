"""LLaVA-OneVision, whose class in vLLM takes no LoRA: vLLM runs transformers' own code for it."""

from rl_vlm.models.families.family import Family

LLAVA_ONEVISION = Family(("llava_onevision",), vllm="transformers")
